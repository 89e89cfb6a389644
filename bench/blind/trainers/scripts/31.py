import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# NeMo-RL: normalize_rewards with use_leave_one_out_baseline: the std of seven equal rewards that fp32 cannot hold exactly is a residue, not 0; the eighth's advantage is divided by it.
class S(Sim):
    steps = 16; G = 8; n_prompts = 8; acc0 = 2.6; NP = 60; lr = .02; adv_kind = 'loo'
    def rewards(s, b): return {'r': 0.95 * super().rewards(b)['accuracy_reward']}
    def advantages(s, R, b):
        A = np.zeros(len(R))
        for g in np.unique(b['grp']):
            q = np.nonzero(b['grp'] == g)[0]; x = R[q].astype(np.float32); n = len(x); M = (np.ones((n, n)) - np.eye(n)).astype(np.float32)
            mu = np.float32(M @ x / np.float32(n - 1)); sq = np.float32(M @ (x * x) / np.float32(n - 1)); sd = np.sqrt(np.maximum(sq - mu * mu, np.float32(0)))
            a = (x - mu).astype(np.float32); nz = sd > 0; a[nz] = a[nz] / (sd[nz] + np.float32(1e-6)); A[q] = a
        return A
W.nemo(S(123).run(), NN, cfg={'grpo': {'normalize_rewards': True, 'use_leave_one_out_baseline': True}})
