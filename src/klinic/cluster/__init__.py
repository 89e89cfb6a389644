"""Ray worker processes of a run, on one machine or many. Only this package imports Ray.

session.py         starts a local Ray, or joins a running cluster; addresses and free ports
placement.py       the processes that a recipe needs, and their resources
reservation.py     reserves them in Ray, with a GPU for the driver's own learner rank
worker.py          the Ray actor
worker_pool.py     a pool of workers of one kind: health checks, restarts, resubmitted work
samplers.py        a sampler backed by a worker pool
sampler_worker.py  the sampler inside a worker
learners.py        the other ranks of a sharded learner
"""
