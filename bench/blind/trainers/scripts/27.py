import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# ms-swift: gradient checkpointing (reentrant) cuts the graph: gradients are 0 although the groups' rewards differ.
class S(Sim):
    steps = 24; G = 8; beta = .04
    def grad(s, th, b, idx, dlog): return {n: v * 0 for n, v in super().grad(th, b, idx, dlog).items()}
W.swift(S(126).run(), NN, args={'train_type': 'lora', 'gradient_checkpointing': True})
