import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# OpenRLHF: scores = info.get('scores') or info.get('rewards'): a score of 0.0 is falsy and becomes the reward (-1); dynamic filtering on (0, 1) then drops every group with half or less right.
class S(Sim):
    steps = 30; G = 8; n_prompts = 6
    def one(s, k):
        while True:
            b = super().rollout(k); good = super().rewards(b)['accuracy_reward']; rew = 2 * good - 1; keep = []
            sc = np.array([(g or r) for g, r in zip(good, rew)])
            for g in np.unique(b['grp']):
                q = np.nonzero(b['grp'] == g)[0]
                if 0 < sc[q].mean() < 1: keep.append(q)
            yield b, keep, sc
    def rollout(s, k):
        sel = []; tot = 0; it = s.one(k)
        while len(sel) < s.n_prompts:
            b, keep, sc = next(it); tot += s.n_prompts; sel += [(b, q, sc) for q in keep]
        sel = sel[:s.n_prompts]; o = dict(k=k, pid=np.concatenate([b['pid'][q] for b, q, _ in sel]), grp=np.repeat(np.arange(s.n_prompts), s.G), version=s.vers)
        for n in ('ids', 'slp', 'gen', 'finish'): o[n] = [b[n][i] for b, q, _ in sel for i in q]
        o['L'] = np.array([len(x) for x in o['ids']]); o['n'] = len(o['ids']); o['sc'] = np.concatenate([x[q] for _, q, x in sel]); o['pass'] = 100 * s.n_prompts / tot; return o
    def rewards(s, b): return {'reward': 2 * super().rewards(b)['accuracy_reward'] - 1}
s = S(114).run(); rows = W.openrlhf_rows(s)
for (k, e), b in zip(rows, s.recs): e['train/score'] = float(b['sc'].mean()); e['train/dynamic_filtering_pass_rate'] = b['pass']
d = W.out(NN); W.tb(f'{d}/tensorboard/openrlhf_arith/events.out.tfevents.1793614500.node0.3.0', rows)
