"""What touches torch models directly: today, making torch on a CPU repeat itself exactly."""
