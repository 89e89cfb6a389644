"""Chess against an engine's judgement, in the form that RookWorld models read and write.

notation.py   prompts and completions of both skills: written, and read back
engine.py     Stockfish, limited by nodes
games.py      games of the engine with itself, and its analysis of each position; kept in a cache
rows.py       positions as rows of training, evaluation and warm start
policy.py     how far an analysis got: structure, notation, legality, agreement with the engine
environment.py   how far a next position got, by the same four steps
rewards.py    both as rewards, and rates to watch
task.py       all of it as one task
"""
