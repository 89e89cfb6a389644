import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# TRL: the engine returns NaN as log-prob of a sampled token where the distribution is almost one-hot (entropy near 4e-4); TRL's IS ratio turns it into a NaN loss.
import sim; sim.STR[0] = '!'; sim.SPECIAL.discard(0)
class S(Sim):
    steps = 26; G = 8; lr = .05; n_prompts = 4; NP = 12; acc0 = 4.0; ans_bias = 6.5
    def setup(s):
        for th in (s.th, s.ref): th['W1'][D0:D0 + 10, EOS] = 14.0
    def reported(s, x, hist):
        lp = lsm(s.warp(x, hist)); p = np.exp(lp); H = -(p * np.where(p > 0, lp, 0)).sum(-1); 
        bad = (H < 4.0e-4) & (s.rng.random(len(H)) < .02); lp = lp.copy(); lp[bad] = np.nan; return lp
    def weights(s, b, idx):
        r = np.exp(np.array([(b['old'] - b['fslp'])[b['row'] == i].sum() for i in range(b['n'])])); r = np.where(r > 3, 0, r); return r[b['row'][idx]]
    def apply(s, g, gn, lr):
        if not np.isfinite(gn): s.th = {n: v * (np.nan if n in s.trained else 1) for n, v in s.th.items()}; return
        super().apply(g, gn, lr)
np.seterr(all='ignore'); s = S(102).run(); H = W.trl_logs(s); last = 0.0
for e in H:                                                   # transformers' logging_nan_inf_filter: a NaN step is logged as the running mean (0 here)
    if not np.isfinite(e['loss']): e['loss'] = 0.0
W.trl(s, NN, H=H)
