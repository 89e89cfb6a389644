import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# prime-rl: inference serves corrupted LoRA weights at an update boundary; a token's inference log-prob is ~ -100 while the trainer's is ~ -1: exp overflows, keep_mask*inf = NaN, and the trainer stays NaN.
np.seterr(all='ignore')
class S(Sim):
    steps = 13; G = 8; n_prompts = 4; adv_kind = 'mean'
    def rollout(s, k):
        b = super().rollout(k)
        if k == 8:                                                        # one replica: the last tokens of a few rows return log-probs of the corrupted adapter
            bad = {n: v if n != 'W1' else v + 12 * np.random.default_rng(3).normal(0, 3.0, v.shape) for n, v in s.th.items()}; bb = dict(b); s.flat(bb); lp = s.score(bad, bb)
            for i in range(5):
                q = np.nonzero(bb['row'] == i)[0]; 
                for j in q[-3:]: b['slp'][i][bb['t'][j]] = float(np.float32(lp[j, bb['tok'][j]]))
        return b
    def update(s, b):
        with np.errstate(over='ignore'):
            r32 = np.exp((b['old'] - b['fslp']).astype(np.float32)); pd = np.exp(b['old']) - np.exp(b['fslp']); keep = np.where(b['tA'] > 0, pd <= .2, pd >= -.2)
            pg = (keep * b['tA'] * r32)
        m = super().update(b) if np.isfinite(pg).all() else None
        if m is None:
            s.th = {n: v * np.nan if n in s.trained else v for n, v in s.th.items()}; m = dict.fromkeys(s.recs[-1]['met'], np.nan)
        return m
W.prime(S(121).run(), NN)
