"""Checks of scalar logs, each with the causes that could explain a failure.

    check.py     ScalarCheck, ScalarFinding, and helpers to read columns
    figures.py   not-a-number, gradient-explodes, no-gradient
    rewards.py   missing-rewards, equal-rewards, equal-completions, cut-off
    kl.py        kl-at-step-0, negative-kl, kl-stays-0, drift-without-reward
    sampler.py   sampler-far-from-learner
    examine.py   runs all checks on a log and returns the diagnosis
    sentences.py the verdict and what was read, as sentences

A scalar is a mean over a step. It shows that something is wrong, and seldom the cause: most causes
produce the same scalars. So a finding lists all causes that fit, and its check lists the fields at
token level that distinguish them; a cause is named only if one is left. Limits are set so that a
healthy run raises no alarm: a loss of 0, a KL that rises with the reward, a passing spike, no KL at
beta 0 or a clip ratio of 0 is not a fault.

Nothing here imports NumPy: checking a log takes less time than that import.
"""
