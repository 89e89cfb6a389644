import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# AReaL: after recovery the version is restored but the staleness manager's accepted counter restarts at 0: capacity = (max_staleness + version + 1) * bs - accepted jumps.
class S(Sim):
    steps = 30; G = 8; n_prompts = 4; lr = .03; ofp = 2; rec_at = 13
    def setup(s): s.queue = []; s.accepted = 0; s.tid = 0
    def get_batch(s, k):
        ver = k - 1
        if ver == s.rec_at: s.accepted = 0; s.queue = []                   # restart: in-flight work is gone, counter too
        cap = (s.ofp + ver + 1) * s.n_prompts - s.accepted
        while cap > 0:
            b = super().rollout(k); 
            for g in range(s.n_prompts):
                q = np.nonzero(b['grp'] == g)[0]; s.queue.append((s.tid, ver, {n: [b[n][i] for i in q] for n in ('ids', 'slp', 'gen', 'finish', 'pid')})); s.tid += 1
            cap -= s.n_prompts; s.accepted += s.n_prompts
        take, s.queue = s.queue[:s.n_prompts], s.queue[s.n_prompts:]
        o = {n: [x for t in take for x in t[2][n]] for n in ('ids', 'slp', 'gen', 'finish', 'pid')}; o['pid'] = np.array(o['pid']); o['n'] = len(o['ids']); o['L'] = np.array([len(x) for x in o['ids']])
        o['grp'] = np.repeat(np.arange(len(take)), s.G); o['head'] = o['tail'] = np.repeat([t[1] for t in take], s.G); o['tid'] = np.array([t[0] for t in take]); o['rle'] = [[[int(v), int(l)]] for v, l in zip(o['head'], o['L'])]; o['version'] = ver; return o
W.areal(S(122).run(), NN, cfg={'recover': {'mode': 'auto'}})
