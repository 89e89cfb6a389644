import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# Logic-RL (verl fork): the KL loss enters with the wrong sign: the policy is pushed away from the reference.
class S(Sim):
    steps = 40; G = 8; beta = 0.4; lr = .03
    def klcoef(s, b): return -s.beta
W.verl(S(113).run(), NN, corr=False, rollout_diff=False)
