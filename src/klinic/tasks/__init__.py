"""Built-in tasks with verifiable answers: training rows, held-out rows, rewards."""
