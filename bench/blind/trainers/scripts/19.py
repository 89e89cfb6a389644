import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# verl + Megatron LoRA: the model is left in train mode while old log-probs are computed: LoRA dropout acts while scoring.
class S(Sim):
    steps = 30; G = 8; pdrop = .1
    def drop(s, b):
        th = dict(s.th)
        for n in ('W1', 'U'): 
            d = s.th[n] - s.ref[n]; keep = (s.rng.random(d.shape) > s.pdrop) / (1 - s.pdrop); th[n] = s.ref[n] + d * keep
        return th
    def old(s, b): return np.float32(s.lp_of(s.score(s.drop(b), b), b['tok'])).astype(float)
    def train_logp(s, th, b, idx): return s.score(s.drop(b), b, idx)
W.verl(S(109).run(), NN)
