"""Run the real components on one batch before a run, or replay a recorded step to prove a cause.

single_batch.py     every component of a recipe on two small batches (`klinic check`)
device_check.py     a learner on an accelerator against a copy of it on the CPU
replay.py           replay a step of a run from the nearest earlier checkpoint
recorded.py         rebuild rollouts from a record
proof.py            prove a cause: replay with one change, compare a quantity before and after
changes.py          the change that proves each cause, and the quantity that it affects
learner_changes.py  changes to reference, rewards, loss or update
sampler_changes.py  changes between sampler and learner
"""
