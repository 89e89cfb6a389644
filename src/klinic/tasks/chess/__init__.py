"""The chess task, graded against Stockfish, in the format of RookWorld models.

notation.py   formats and parses the prompts and completions of both skills
engine.py     Stockfish with a node limit
games.py      self-play games of the engine with its analysis of each position, cached
rows.py       rows of training, evaluation and warm start
policy.py     grades of an analysis: structure, notation, legality, agreement with the engine
environment.py   the same grades of a predicted next position
rewards.py    reward functions of both skills, and rates to monitor
task.py       the task object
"""
