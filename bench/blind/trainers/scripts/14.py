import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# TRL, loss_type dapo, mask_truncated_completions=True: truncated rows leave the numerator but stay in the denominator (num_items_in_batch).
class S(Sim):
    steps = 24; G = 8; max_len = 9; n_prompts = 8
    def mask(s, b):
        s.flat(b); t = np.array([f == 'length' for f in b['finish']]); return b['fgen'] * (~t[b['row']])
    def denom(s, b, m, rows): return max(sum(int(b['L'][i]) for i in rows), 1)
W.trl(S(104).run(), NN)
