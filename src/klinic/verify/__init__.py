"""Proof by enumeration: what every KL term really estimates and differentiates.

world.py        small policies whose every completion can be listed
targets.py      the gradients that a KL term could have, as exact sums
expectation.py  mean and variance of a term's gradient over all completions
identify.py     which of those gradients is this one
estimators.py   one row for each name klinic offers
identities.py   what must hold for klinic's own terms, each with its error
meaning.py      what averaging and advantage scaling do to the KL and its coefficient
proof.py        all of this together: what `klinic verify` shows
extremes.py     where a term overflows, cancels or goes dead
function.py     the same questions asked of a user's own function
advice.py       from what was measured of it to a verdict and a paragraph
loading.py      finding and calling that function
monte_carlo.py  the direction of k3 by sampling, on policy and off
"""
