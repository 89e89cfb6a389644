import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# slime, true-on-policy mode: after a regression one layer of the learner runs in another precision: mean difference about 4.5e-4 instead of exactly 0.
class S(Sim):
    steps = 10; G = 8
    def sampler_theta(s, k): return {n: bf16(v) for n, v in s.th.items()}
    def score(s, th, b, idx=None, side='learner', T=None):
        o = {n: bf16(v) for n, v in th.items()}; s.reg = side == 'learner'; r = super().score(o, b, idx, side, T); s.reg = False; return r
    reg = False
    def pf(s, t, side): 
        x = super().pf(t, side); return bf16(x) if s.reg else x
    def setup(s): s.th['Wp'] *= .6; s.ref['Wp'] *= .6
W.slime(S(119).run(), NN)
