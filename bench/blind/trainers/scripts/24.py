import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy prime-rl: async level 1: samples are one update old; mismatch accordingly.
class S(Sim):
    steps = 12; G = 8; n_prompts = 4; adv_kind = 'mean'
    def setup(s): s.prevth = None
    def sampler_theta(s, k): return {n: bf16(v) for n, v in (s.prevth or s.th).items()}
    def rollout(s, k): b = super().rollout(k); b['lag'] = 1 if s.prevth else 0; s.prevth = {n: v.copy() for n, v in s.th.items()}; return b
W.prime(S(204).run(), NN)
