"""Multi-hop questions: MuSiQue rows, and a synthetic task in the same format.

musique.py     converts MuSiQue rows to prompts, with truncation of long contexts
answers.py     extraction, normalisation and comparison of answers
synthetic.py   two- and three-hop questions, short enough for the tiny model
rewards.py     exact match, F1, format, and the fraction of supporting context kept
task.py        the synthetic questions as a task
"""
