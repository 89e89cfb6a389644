"""Ray worker processes of a run, on one machine or many. Only this package imports Ray.

session.py     starts a local Ray, or joins a running cluster
placement.py   the processes that a recipe needs, and their resources
worker.py      the Ray actor
crew.py        a pool of workers of one kind, with health checks and restarts
shares.py      splits work over a pool, resubmits work of dead workers
samplers.py    a sampler backed by a worker pool
hosted.py      the sampler inside a worker
links.py       weight transfer to samplers: shared memory or network broadcast
learners.py    the other ranks of a sharded learner
addresses.py   host addresses, free ports, network interfaces
"""
