import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# prime-rl, two turns with a template that strips past thinking: turn 2 was sampled in a context without turn 1's <think> section; the training row keeps it.
TURN2 = [5, USER, 20, ASST]
class S(Sim):
    steps = 10; G = 8; think = True; max_len = 60; n_prompts = 4
    def prompt_ids(s, pid): return super().prompt_ids(pid)
    def rollout(s, k):
        a = super().rollout(k); th = s.sampler_theta(k); n = a['n']; ids, slp, gen, fin = [], [], [], []
        for i in range(n):
            x, l, g = list(a['ids'][i]), list(a['slp'][i]), list(a['gen'][i]); f = a['finish'][i]
            if f == 'stop':
                kept = x[x.index(ETHINK) + 1:] if ETHINK in x else x                    # what the template leaves of turn 1
                hist = kept + TURN2; c = np.zeros((1, s.E.shape[1]))
                for tk in hist: c = s.ctx(c, np.array([tk]))
                t = len(hist); prev = ASST; y, m = [], []; f = 'length'
                for _ in range(26):
                    lp = lsm(s.warp(s.logits(th, np.array([prev]), a['pid'][i:i + 1], np.array([t]), c, 'sampler'), None))[0]; p = np.exp(lp)
                    tok = int((s.rng.random() > np.cumsum(p) / p.sum()).sum().clip(0, V - 1)); y.append(tok); m.append(float(np.float32(lp[tok]))); c = s.ctx(c, np.array([tok])); prev = tok; t += 1
                    if tok == EOS: f = 'stop'; break
                x += TURN2 + y; l += [0.0] * 4 + m; g += [0] * 4 + [1] * len(y)
            ids.append(x); slp.append(l); gen.append(g); fin.append(f)
        a.update(ids=ids, slp=slp, gen=gen, finish=fin, L=np.array([len(x) for x in ids])); return a
    adv_kind = 'mean'
    def setup(s):
        for th in (s.th, s.ref): th['Wc'] *= 2.2; th['W1'][np.ix_(np.arange(W0, V), [ETHINK])] = 3.2; th['W1'][ETHINK, ANS] = 5.0; th['W1'][np.ix_(np.arange(W0, V), [ANS])] = 1.5
    def rewards(s, b):
        r = np.zeros(b['n'])
        for i, x in enumerate(b['ids']):
            j = len(x) - 1 - x[::-1].index(ANS) if ANS in x else -1
            r[i] = float(0 <= j < len(x) - 1 and x[j + 1] - D0 == s.ansd[b['pid'][i]])
        return {'score': r}
W.prime(S(120).run(), NN)
