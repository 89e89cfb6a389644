import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# verl + vLLM, MoE: after a sync the packed expert tensors are not understood by the engine, so experts keep their first values; the rest is new.
class S(Sim):
    steps = 30; G = 8; moe = True; lr = .035
    def sampler_theta(s, k): return {n: bf16(s.ref[n] if n == 'X' else v) for n, v in s.th.items()}
W.verl(S(108).run(), NN)
