"""What a log of scalars decides, and what it cannot: signs, each with the causes behind it.

    sign.py      what a sign is, and how a column is looked at
    figures.py   not-a-number, gradient-explodes, no-gradient
    rewards.py   missing-rewards, equal-rewards, equal-completions, cut-off
    kl.py        kl-at-step-0, negative-kl, kl-stays-0, drift-without-reward
    sampler.py   sampler-far-from-learner
    examine.py   all signs of a log, and what is said of it

A scalar is a mean over a step. It tells that something is wrong, and seldom what: most causes leave
the same scalars. So a sign names all causes that would, and which token-level fields tell them
apart; a cause is named only where a sign leaves one. Limits are such that a healthy run is not
alarmed: what users mistake for a fault (a loss of 0, a KL that rises with the reward, a spike that
passes, no KL at beta 0, a clip ratio of 0) is none here.

Nothing here imports NumPy: a log is judged in less time than that takes to load.
"""
