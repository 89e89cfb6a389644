"""Measurements of klinic itself: faults in real runs, and what the doctor says of them."""
