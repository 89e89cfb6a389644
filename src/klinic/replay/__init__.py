"""Run the real components on one batch before a run, or replay a recorded step to prove a cause.

single_batch.py     every component of a recipe on two small batches (`klinic check`)
check_report.py     the result of a check: one line per component
device_check.py     a learner on an accelerator against a copy of it on the CPU
self_test.py        sampler gap, host waits, save and resume, and memory on a device
self_test_report.py the text file of these results, for a bug report
host_waits.py       counts where the host waits for a device, by line
replay.py           replay a step of a run from the nearest earlier checkpoint
recorded.py         rebuild rollouts from a record
proof.py            prove a cause: replay with one change, compare a quantity before and after
changes.py          the change that proves each cause, and the quantity that it affects
provable.py         names of these causes, without torch
learner_changes.py  changes to reference, rewards, loss or update
sampler_changes.py  changes between sampler and learner
"""
