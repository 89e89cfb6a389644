"""Sums, differences and small operations on digits, for a model that reads characters.

skills.py    the questions of each skill, and the form of its answers
rows.py      which questions are held out, and the rows made of the others
rewards.py   right or wrong, or a part of the reward for a part of the answer
task.py      all of it as one task
"""
