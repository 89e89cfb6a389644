import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# TRL + PEFT: GRPO goes on with an SFT adapter; the reference is 'adapter off' = the base model, not the SFT model.
class S(Sim):
    steps = 22; G = 8; beta = 0.04; acc0 = 2.2
    def setup(s):
        r = np.random.default_rng(5); d = r.normal(0, .9, s.ref['W1'].shape); d[:, :W0] *= .3
        s.ref['W1'] = s.ref['W1'] - d; s.ref['U'] = s.ref['U'] * .35
W.trl(S(103).run(), NN)
