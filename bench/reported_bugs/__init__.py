"""Public bug reports of RL trainers, rebuilt as small real runs.

    python -m bench.reported_bugs THREAD FOLDER [SEED]

One file a thread, named after its repository and number. Each says what was reported, what was
found to be the cause, how it is rebuilt, and which figures were seen here; `train(folder, seed)`
makes the run, with klinic's evidence in the folder and TRL's own log beside it. expected.json
holds the causes in plain words, as the threads tell them. They were written from the threads alone:
whoever wrote them did not know how the doctor decides.
"""
