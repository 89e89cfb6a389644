"""What produces completions, each token with the log-prob it was drawn at."""
