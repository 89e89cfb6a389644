"""Questions whose answer takes several facts: MuSiQue's form, its judges, and a set of our own.

musique.py     rows of MuSiQue's form as prompts, cut where they are too long
answers.py     what an answer is, normalised as usual, and how much of it is right
synthetic.py   two- and three-hop questions in the same form, short enough for the tiny model
rewards.py     exact match, F1, format, and how much of the context was kept
task.py        the synthetic questions as a task
"""
