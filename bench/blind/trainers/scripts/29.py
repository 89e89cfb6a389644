import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# Unsloth: the learner's padded forward passes no position_ids, so a left-padded row is scored at positions shifted by its pad length.
class S(Sim):
    steps = 20; G = 8; ans_bias = 2.6; max_len = 40
    def plen(s, pid): return (int(pid) * 7) % 15
    def prompt_ids(s, pid):
        p = super().prompt_ids(pid); return p[:2] + [W0 + (pid * 3 + j) % 50 for j in range(s.plen(pid))] + p[2:]
    def logits(s, th, prev, pid, t, c, side):
        if side == 'learner':
            pl = np.array([s.plen(i) for i in range(s.NP)]); t = t + (s.pmax - pl)[pid]
        return super().logits(th, prev, pid, t, c, side)
    def rollout(s, k): b = super().rollout(k); s.pmax = max(s.plen(i) for i in b['pid']); return b
    def setup(s): s.pmax = 0; s.th['Wp'] *= 1.3; s.ref['Wp'] *= 1.3
W.trl(S(106).run(), NN)
