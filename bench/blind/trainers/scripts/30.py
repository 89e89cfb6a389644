import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# NeMo-RL, gpt-oss: the engine computes YaRN RoPE with other frequencies than the learner: the gap grows with position.
class S(Sim):
    steps = 10; G = 8; n_prompts = 4; max_len = 64; ans_bias = 0.8
    def setup(s):
        for th in (s.th, s.ref): th['Wp'] *= 1.5
    def pf(s, t, side):
        f = s.freq * (np.array([1, .97, .9, .75, .5]) if side == 'sampler' else 1); a = np.asarray(t)[..., None] * f; return np.concatenate([np.cos(a), np.sin(a)], -1)
W.nemo(S(124).run(), NN)
