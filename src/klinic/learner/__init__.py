"""What turns a batch into a gradient and a gradient into an update."""
