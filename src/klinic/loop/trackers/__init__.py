"""Who is told about a run while it goes on, one file each."""
