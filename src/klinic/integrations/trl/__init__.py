"""klinic beside TRL's GRPOTrainer: its records, its doctor, and TRL's own KL to compare ours with.

attaching.py   the methods that are wrapped, and what is done at each
generation.py  what the sampler says while it draws
drawn.py       completions of a batch, by row
records.py     rows that were trained on, as the record of a step
reference.py   which policy the KL is measured to, and whether it is that one
questions.py   what the live trainer is asked
describe.py    run.json and recipe.yaml, from TRL's config
own_kl.py      TRL's own KL expression
"""

from klinic.integrations.trl.own_kl import mean_kl

__all__ = ["mean_kl"]
