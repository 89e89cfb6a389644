import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# OpenRLHF: sampling at T=0.6, the actor's forward does not divide the logits by T.
class S(Sim):
    steps = 30; G = 8; T = 0.6
    def score(s, th, b, idx=None, side='learner', T=None): return super().score(th, b, idx, side, 1.0)
    def grad(s, th, b, idx, dlog): return super().grad(th, b, idx, dlog * s.T)
s = S(115).run(); d = W.out(NN); W.wandb_history(f'{d}/wandb_export/openrlhf_arith_history.jsonl', W.openrlhf_rows(s))
