"""Ray: processes of a run on one machine or many, kept alive. The only place that imports it.

session.py     Ray itself, started for one run or joined
placement.py   which processes a recipe asks for, and what each reserves
worker.py      a process, from inside
crew.py        all processes of one kind, seen from the first: asked, watched, replaced
shares.py      work divided over a crew
samplers.py    a sampler that is a crew, and hosted.py what each of its processes holds
links.py       how weights get to them
learners.py    the processes that share the learner
addresses.py   where processes reach one another
"""
