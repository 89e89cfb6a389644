import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# TRL, vLLM colocate + sleep mode level 2: waking reloads the original checkpoint; the sync of the trained weights is lost from the third step on.
class S(Sim):
    steps = 24; G = 8; lr = .04
    def sampler_theta(s, k): return {n: bf16(v) for n, v in (s.th if k < 3 else s.ref).items()}
    def weights(s, b, idx):                                   # TRL's vLLM importance-sampling correction (sequence_mask, cap 3)
        r = np.exp(np.array([(b['old'] - b['fslp'])[b['row'] == i].sum() for i in range(b['n'])])); r = np.where(r > 3, 0, r); return r[b['row'][idx]]
W.trl(S(101).run(), NN)
