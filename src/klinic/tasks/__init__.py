"""Tasks whose answers a program can judge: what to train on, and how to tell that it helped."""
