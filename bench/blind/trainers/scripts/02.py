import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy TRL: beta tiny and a high learning rate on purpose; KL climbs far, rewards rise.
class S(Sim):
    steps = 36; G = 8; beta = 1e-4; lr = .08; n_prompts = 6; clip_hi = .28
W.trl(S(201).run(), NN)
