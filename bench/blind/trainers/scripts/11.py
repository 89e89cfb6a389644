import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# SkyRL + vLLM, MoE: reload_weights runs per chunk and restores every layer that is absent from the chunk: only the last chunk is right, expert layers end in an unprocessed layout.
class S(Sim):
    steps = 24; G = 8; moe = True
    def sampler_theta(s, k):
        if k == s.start: return {n: bf16(v) for n, v in s.th.items()}
        o = {}
        for n, v in s.th.items():
            last = n in ('U', 'Wp', 'Wc')
            o[n] = bf16(v if last else (s.ref[n] if n != 'X' else np.roll(s.ref[n].transpose(0, 2, 1).reshape(v.shape), v.shape[-1] // 2, -1)))
        return o
    def setup(s):
        for th in (s.th, s.ref): th['X'] *= 3
s = S(116).run(); d = W.out(NN); W.tb(f'{d}/tensorboard_log/events.out.tfevents.1793614500.node0.5.0', W.skyrl_rows(s))
