import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# NeMo-RL: at resume the reference is loaded from the resumed policy: the KL restarts from 0 against a moved reference.
class S(Sim):
    steps = 34; G = 8; n_prompts = 4; beta = .02; lr = .03
    def after(s, k, b):
        if k == 18: s.ref = {n: v.copy() for n, v in s.th.items()}; s.m = {n: v * 0 + v for n, v in s.m.items()}
s = S(125).run(); d = W.nemo(s, NN, tbd=False); R = W.nemo_rows(s); ex = f'{d}/logs/exp_001/tensorboard'
W.tb(f'{ex}/events.out.tfevents.1793614500.node0.1.0', R[:18]); W.tb(f'{d}/logs/exp_002/tensorboard/events.out.tfevents.1793618900.node0.1.0', R[18:], 1793618900.0)
