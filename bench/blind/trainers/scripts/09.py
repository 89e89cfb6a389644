import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy NeMo-RL: very hard prompts at first: most groups have all-equal rewards early; a few successes, then learning.
class S(Sim):
    steps = 40; G = 8; n_prompts = 8; acc0 = 0; lr = .03; NP = 9
W.nemo(S(203).run(), NN)
