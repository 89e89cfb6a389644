"""`klinic demo`: trains a tiny model on sums, healthy or with an injected fault.

recipe.yaml     the recipe
shown.py        the faults that the demo offers; imports no torch
view.py         live curves of reward, held-out accuracy and KL
run.py          the run
out_folder.py   the folder that `--out` names
recorded.py     the recorded run of `--recorded`; imports no torch
sick_run        its files: run.json, metrics, and the records of 16 steps
"""
