import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# open-r1: EOS of the tokenizer (<|im_end|>) and of the generation config differ: the engine never stops, every completion runs to the limit.
class S(Sim):
    steps = 20; G = 8; max_len = 48; need_stop = False
    def setup(s):
        for th in (s.th, s.ref): th['W1'][EOS, :W0] = -9; th['W1'][EOS, W0:] += 1.5; th['W1'][EOS, EOS] = 2.0
    def is_stop(s, tok): return False
    def rewards(s, b):
        rw = super().rewards(b); f = np.array([0.0 if (x.count(ANS) != 1) else 1.0 for x in b['ids']]); return {'accuracy_reward': rw['accuracy_reward'], 'format_reward': f}
W.trl(S(105).run(), NN, beta_logged=False)
