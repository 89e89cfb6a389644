"""`klinic demo`: a tiny model learns sums, well or broken on purpose.

recipe.yaml   what is trained
shown.py      which faults can be shown; needs no torch
view.py       reward, held-out accuracy and KL while it trains
run.py        the run itself
"""
