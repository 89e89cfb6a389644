import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy slime: T=0.7 on both sides, reference recorded but beta 0 (KL grows freely), eps_clip_high 0.28.
class S(Sim):
    steps = 12; G = 8; n_prompts = 6; T = .7; clip_hi = .28; lr = .04
W.slime(S(205).run(), NN)
