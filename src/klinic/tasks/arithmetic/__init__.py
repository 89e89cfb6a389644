"""The arithmetic task: addition, subtraction and operations on digits, for character models.

skills.py    the questions of each skill, and the format of its answers
rows.py      rows of training, evaluation and warm start
rewards.py   binary and graduated rewards
task.py      the task object
"""
