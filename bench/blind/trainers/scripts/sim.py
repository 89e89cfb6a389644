"""A small GRPO world: a softmax policy over V tokens with real sampling, log-probs, rewards, advantages, gradients.
logits(t) = W1[prev] + U[prompt] + posfeat(t)@Wp + ctx(t)@Wc (+ experts);  ctx = decayed mean of embeddings of all previous tokens."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1'); os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
import numpy as np
V = 96; EOS = 2; BOS = 1; PAD = 0; THINK = 3; ETHINK = 4; USER = 6; ASST = 7; D0 = 8; PLUS = 18; EQ = 19
ANS = 21; EOT = 22; SEARCH = 23; INFO = 24; EINFO = 25; BOX = 26; W0 = 30
WORDS = ("the we so then first add two numbers total is now next because sum carry digit place value check again result "
         "gives hence thus therefore left right side equals plus one more step compute let us see that this makes it mod "
         "ten only keep last part wait maybe actually yes no good done final output write down note here there both each "
         "of in to as for").split()
STR = {PAD: '<pad>', BOS: '<bos>', EOS: '<|im_end|>', THINK: '<think>', ETHINK: '</think>', 5: '\n', USER: 'user', ASST: 'assistant',
       PLUS: '+', EQ: '=', 20: '?', ANS: '####', EOT: '<end_of_turn>', SEARCH: '<search>', INFO: '<information>', EINFO: '</information>', BOX: 'boxed', 27: ';', 28: ',', 29: '.'}
for i in range(10): STR[D0 + i] = str(i)
for i in range(V - W0): STR[W0 + i] = WORDS[i % len(WORDS)] if i < len(WORDS) else f'w{i}'
SPECIAL = {PAD, BOS, EOS}

def text(ids, skip=True):
    return ' '.join(STR.get(int(i), f'<unk{int(i)}>') for i in ids if not (skip and int(i) in SPECIAL))

def bf16(a):
    a = np.asarray(a, np.float32); u = a.view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return u.astype(np.uint32).view(np.float32).astype(np.float64).reshape(a.shape)

def lsm(x):
    m = x.max(-1, keepdims=True); m = np.where(np.isfinite(m), m, 0)
    with np.errstate(all='ignore'): return x - m - np.log(np.exp(x - m).sum(-1, keepdims=True))

class Cfg: pass

class Sim:
    steps = 20; n_prompts = 6; G = 8; T = 1.0; lr = 0.03; beta = 0.0; clip_lo = 0.2; clip_hi = 0.2; n_mini = 1; epochs = 1
    max_len = 32; NP = 40; adv_kind = 'grpo'; ent_coef = 0.0; kl_est = 'k3'; max_grad_norm = 1.0; moe = False; start = 1
    eos = EOS; acc0 = 1.6; b1, b2, eps = 0.9, 0.95, 1e-8; think = False; agg = 'token'; search = False; warm = 0
    trained = ('W1', 'U', 'Wp'); ans_bias = 3.6; use_old = 'learner'; steady = False; sampler_noise = True; hard_frac = 0.0; need_stop = True

    def __init__(s, seed):
        s.rng = np.random.default_rng(seed); s.seed = seed; r = np.random.default_rng(seed + 7919)
        s.prompts = [(int(a), int(b)) for a, b in zip(r.integers(0, 10, s.NP), r.integers(0, 10, s.NP))]
        s.ansd = np.array([(a + b) % 10 for a, b in s.prompts])
        d = 12
        W1 = r.normal(0, 1.3, (V, V)); W1[:, :W0] -= 9.0; W1[:, V - 8:] -= 1.0
        words = np.arange(W0, V)
        W1[np.ix_(words, [ANS])] = s.ans_bias; W1[np.ix_(words, np.arange(D0, D0 + 10))] = -4.0
        W1[ASST, ANS] = 0.3; W1[ASST, W0:] += 0.5
        W1[ANS, :] = -9.0 + r.normal(0, .5, V); W1[ANS, D0:D0 + 10] = 3.0 + r.normal(0, .3, 10)
        W1[D0:D0 + 10, :W0] = -9.0; W1[D0:D0 + 10, s.eos] = 5.2; W1[D0:D0 + 10, W0:] = r.normal(-1.0, .5, (10, V - W0))
        if s.think:
            W1[ASST, :] = -8; W1[ASST, THINK] = 5; W1[THINK, :W0] = -9; W1[np.ix_(words, [ETHINK])] = 0.9; W1[np.ix_(words, [ANS])] = 0.6
            W1[ETHINK, :W0] = -9; W1[ETHINK, ANS] = 2.5
        if s.search:
            W1[np.ix_(words, [SEARCH])] = 1.0; W1[ASST, SEARCH] = 1.5; W1[EINFO, :W0] = -9; W1[EINFO, ANS] = 2.0; W1[EINFO, SEARCH] = 0.5
        U = r.normal(0, .15, (s.NP, V)); U[np.arange(s.NP), D0 + s.ansd] += s.acc0
        if s.hard_frac:
            h = np.arange(s.NP) < s.hard_frac * s.NP; U[np.where(h)[0], D0 + s.ansd[h]] -= s.acc0 + 9
        Wp = r.normal(0, .35, (10, V)); Wp[:, :W0] *= .3
        s.E = r.normal(0, 1, (V, d)); Wc = r.normal(0, .25, (d, V)); Wc[:, :W0] *= .4
        th = dict(W1=W1, U=U, Wp=Wp, Wc=Wc)
        if s.moe:
            th['X'] = r.normal(0, .22, (8, d, V)); th['X'][:, :, :W0] *= .4
            s.R = r.normal(0, 1, (d, 8)); s.trained = tuple(s.trained) + ('X',)
        s.th = th; s.freq = np.array([1., .4, .15, .06, .02])
        s.ref = {k: v.copy() for k, v in th.items()}
        s.m = {k: np.zeros_like(th[k]) for k in s.trained}; s.v = {k: np.zeros_like(th[k]) for k in s.trained}; s.n_upd = 0
        s.history = []; s.vers = 0; s.recs = []; s.tokens_seen = 0
        s.setup()
    def setup(s): pass
    # ---------------------------------------------------------------- model
    def gates(s, prev):
        g = s.E[prev] @ s.R; i = np.argsort(-g, -1)[..., :2]; w = np.take_along_axis(g, i, -1); w = np.exp(w - w.max(-1, keepdims=True)); return i, w / w.sum(-1, keepdims=True)
    def pf(s, t, side):
        a = np.asarray(t)[..., None] * s.freq; return np.concatenate([np.cos(a), np.sin(a)], -1)
    def logits(s, th, prev, pid, t, c, side):
        x = th['W1'][prev] + th['U'][pid] + s.pf(t, side) @ th['Wp'] + c @ th['Wc']
        if s.moe:
            i, w = s.gates(prev); e = s.E[prev]
            for j in range(2): x = x + w[:, j:j + 1] * np.einsum('nd,ndv->nv', e, th['X'][i[:, j]])
        return x
    def prompt_ids(s, pid):
        a, b = s.prompts[pid]; return [BOS, USER, D0 + a, PLUS, D0 + b, EQ, ASST]
    def prompt_text(s, pid): return text(s.prompt_ids(pid))
    # ---------------------------------------------------------------- sampler
    def sampler_theta(s, k): return {n: bf16(v) for n, v in s.th.items()} if s.sampler_noise else s.th
    def warp(s, x, hist): return x / s.T                                # logits that are sampled from
    def reported(s, x, hist): return lsm(s.warp(x, hist))                 # log-probs that the engine returns
    def pick(s, k): return s.rng.choice(s.NP, s.n_prompts, replace=False)
    def group_sizes(s, k): return [s.G] * s.n_prompts
    def is_stop(s, tok): return tok == s.eos
    def inject(s, tok, row): return []                                   # tokens the environment appends
    def rollout(s, k):
        th = s.sampler_theta(k); pids = s.pick(k); gs = s.group_sizes(k)
        pid = np.repeat(pids, gs); grp = np.repeat(np.arange(len(pids)), gs); n = len(pid)
        prev = np.full(n, ASST); c = np.zeros((n, s.E.shape[1])); alive = np.ones(n, bool)
        ids = [[] for _ in range(n)]; slp = [[] for _ in range(n)]; gen = [[] for _ in range(n)]; queue = [[] for _ in range(n)]; nin = np.zeros(n, int)
        for t in range(s.max_len):
            x = s.logits(th, prev, pid, np.full(n, t), c, 'sampler'); hist = ids
            p = np.exp(lsm(s.warp(x, hist))); lp = s.reported(x, hist)
            u = s.draw(n, t, k); cdf = np.cumsum(p, -1); cdf /= cdf[:, -1:]
            tok = (u[:, None] > cdf).sum(-1).clip(0, V - 1)
            for i in range(n):
                if not alive[i]: continue
                if queue[i]: tok[i] = queue[i].pop(0); ids[i].append(int(tok[i])); slp[i].append(0.0); gen[i].append(0)
                else:
                    ids[i].append(int(tok[i])); slp[i].append(float(np.float32(lp[i, tok[i]]))); gen[i].append(1)
                    if s.is_stop(tok[i]): alive[i] = False
                    else: queue[i] = list(s.inject(tok[i], i))
            c = s.ctx(c, tok); prev = tok
            if not alive.any(): break
        L = np.array([len(x) for x in ids])
        return dict(k=k, pid=pid, grp=grp, ids=ids, slp=slp, gen=gen, L=L, finish=['stop' if not a else 'length' for a in alive], n=n, version=s.vers)
    def draw(s, n, t, k): return s.rng.random(n)
    def ctx(s, c, tok): return 0.9 * c + 0.1 * s.E[tok] * 2
    # ---------------------------------------------------------------- learner
    def flat(s, b):
        if 'row' in b: return
        n = b['n']; M = int(b['L'].max()); tok = np.full((n, M), PAD); 
        for i, x in enumerate(b['ids']): tok[i, :len(x)] = x
        prev = np.concatenate([np.full((n, 1), ASST), tok[:, :-1]], 1); c = np.zeros((n, s.E.shape[1])); C = np.zeros((n, M, s.E.shape[1]))
        for t in range(M): C[:, t] = c; c = s.ctx(c, tok[:, t])
        ok = np.arange(M)[None] < b['L'][:, None]; b['row'], b['t'] = np.nonzero(ok)
        b['tok'] = tok[ok]; b['prev'] = prev[ok]; b['c'] = C[ok]; b['fpid'] = b['pid'][b['row']]; b['fgen'] = np.concatenate([np.asarray(g) for g in b['gen']]) if n else np.zeros(0)
        b['fslp'] = np.concatenate([np.asarray(x) for x in b['slp']])
    def score(s, th, b, idx=None, side='learner', T=None):
        s.flat(b); q = slice(None) if idx is None else idx
        x = s.logits(th, b['prev'][q], b['fpid'][q], b['t'][q], b['c'][q], side) / (s.T if T is None else T)
        return lsm(x)
    def lp_of(s, lp, tok): return lp[np.arange(len(tok)), tok]
    def old(s, b): return np.float32(s.lp_of(s.score(s.th, b), b['tok'])).astype(float)
    def reflp(s, b): return np.float32(s.lp_of(s.score(s.ref, b), b['tok'])).astype(float)
    def mask(s, b): s.flat(b); return b['fgen'].astype(float)
    def klmask(s, b): return s.mask(b)
    def rewards(s, b):
        acc = np.zeros(b['n']); fmt = np.zeros(b['n'])
        for i, x in enumerate(b['ids']):
            x = [v for v, g in zip(x, b['gen'][i]) if g] if s.search else x
            j = x.index(ANS) if ANS in x else -1
            if j >= 0 and j + 1 < len(x) and D0 <= x[j + 1] < D0 + 10:
                fmt[i] = 1.0 if b['finish'][i] == 'stop' else 0.0; acc[i] = float(x[j + 1] - D0 == s.ansd[b['pid'][i]] and (b['finish'][i] == 'stop' or not s.need_stop))
        return {'accuracy_reward': acc}
    def total(s, rw): return sum(rw.values())
    def advantages(s, R, b):
        A = np.zeros(len(R))
        for g in np.unique(b['grp']):
            q = b['grp'] == g; r = R[q]; a = r - r.mean()
            if s.adv_kind == 'grpo': a = a / ((r.std(ddof=1) if len(r) > 1 else 0.0) + 1e-6 if s.adv_kind == 'grpo' else 1)
            A[q] = a
        return A
    def tokadv(s, A, b): return A[b['row']]
    def denom(s, b, m, rows): return max(m.sum(), 1)
    def grad(s, th, b, idx, dlog):
        g = {n: np.zeros_like(th[n]) for n in s.trained}; dlog = dlog / s.T
        if 'W1' in g: np.add.at(g['W1'], b['prev'][idx], dlog)
        if 'U' in g: np.add.at(g['U'], b['fpid'][idx], dlog)
        if 'Wp' in g: g['Wp'] += s.pf(b['t'][idx], 'learner').T @ dlog
        if 'X' in g:
            i, w = s.gates(b['prev'][idx]); e = s.E[b['prev'][idx]]
            for j in range(2): np.add.at(g['X'], i[:, j], (w[:, j:j + 1] * e)[:, :, None] * dlog[:, None, :])
        return g
    def klcoef(s, b): return s.beta
    def kl_grad(s, d):      # d = logp - ref ; returns kl value and dkl/dlogp
        if s.kl_est == 'k3': return np.exp(-d) + d - 1, 1 - np.exp(-d)
        if s.kl_est == 'k2': return .5 * d * d, d
        return d, np.ones_like(d)
    def lr_at(s, k): return s.lr
    def train_logp(s, th, b, idx): return s.score(th, b, idx)
    def update(s, b):
        k = b['k']; s.flat(b); m = s.mask(b); km = s.klmask(b); A = b['tA']; rows = np.unique(b['row']); out = []
        for ep in range(s.epochs):
            perm = np.arange(b['n']) if s.n_mini == 1 else s.rng.permutation(b['n'])
            for rw in np.array_split(perm, s.n_mini):
                sel = np.zeros(b['n'], bool); sel[rw] = True; idx = np.nonzero(sel[b['row']])[0]
                lp = s.train_logp(s.th, b, idx); tok = b['tok'][idx]; l = s.lp_of(lp, tok); p = np.exp(lp)
                dlr = l - b['old'][idx]; ratio = np.exp(np.clip(dlr, -60, 60)); a = A[idx]; mm = m[idx]; kk = km[idx]; D = s.denom(b, mm, rw)
                w = s.weights(b, idx)
                lo = (ratio < 1 - s.clip_lo) & (a < 0); hi = (ratio > 1 + s.clip_hi) & (a > 0)
                pg = -np.minimum(ratio * a, np.clip(ratio, 1 - s.clip_lo, 1 + s.clip_hi) * a) * w
                dl = np.where(lo | hi, 0, -ratio * a) * w * mm / D
                kl, dkl = s.kl_grad(l - b['ref'][idx]); 
                dl = dl + s.klcoef(b) * dkl * kk / max(kk.sum(), 1)
                H = -(p * np.where(p > 0, lp, 0)).sum(-1)
                oh = np.zeros_like(p); oh[np.arange(len(tok)), tok] = 1
                dlog = dl[:, None] * (oh - p)
                if s.ent_coef: dlog += (s.ent_coef * mm / max(mm.sum(), 1))[:, None] * p * (lp + H[:, None])
                g = s.grad(s.th, b, idx, dlog); gn, g = s.reduce(g, b)
                s.apply(g, gn, s.lr_at(k))
                mean = lambda x, q=mm: float((x * q).sum() / max(q.sum(), 1))
                pgl = float((pg * mm).sum() / D); kll = mean(kl, kk)
                out.append(dict(pg_loss=pgl, kl=kll, loss=pgl + s.klcoef(b) * kll - s.ent_coef * mean(H), grad_norm=gn, clip_lo=mean(lo.astype(float)), clip_hi=mean(hi.astype(float)),
                                ppo_kl=mean(-dlr), entropy=mean(H), ratio=mean(ratio), ratio_max=float(ratio[mm > 0].max()) if (mm > 0).any() else 1., ratio_min=float(ratio[mm > 0].min()) if (mm > 0).any() else 1.,
                                k1=mean(l - b['ref'][idx], kk), k2=mean(.5 * (l - b['ref'][idx]) ** 2, kk), k3=mean(np.exp(np.clip(b['ref'][idx] - l, -50, 50)) + l - b['ref'][idx] - 1, kk)))
        return {q: float(np.mean([o[q] for o in out])) if q not in ('ratio_max', 'ratio_min') else (max if 'max' in q else min)(o[q] for o in out) for q in out[0]}
    def weights(s, b, idx): return np.ones(len(idx))
    def reduce(s, g, b):
        gn = float(np.sqrt(sum((x ** 2).sum() for x in g.values()))); return gn, g
    def apply(s, g, gn, lr):
        sc = min(1.0, s.max_grad_norm / (gn + 1e-6)) if np.isfinite(gn) else np.nan; s.n_upd += 1
        for n in g:
            x = g[n] * sc; s.m[n] = s.b1 * s.m[n] + (1 - s.b1) * x; s.v[n] = s.b2 * s.v[n] + (1 - s.b2) * x * x
            s.th[n] = s.th[n] - lr * (s.m[n] / (1 - s.b1 ** s.n_upd)) / (np.sqrt(s.v[n] / (1 - s.b2 ** s.n_upd)) + s.eps)
    def get_batch(s, k): return s.rollout(k)
    def rescale(s, R, b): return R
    def run(s):
        for k in range(s.start, s.start + s.steps):
            b = s.get_batch(k); b['k'] = k; s.flat(b)
            b['old'] = s.old(b); b['ref'] = s.reflp(b); b['rw'] = s.rewards(b); b['R'] = s.total(b['rw']); b['A'] = s.advantages(s.rescale(b['R'], b), b); b['tA'] = s.tokadv(b['A'], b)
            lp = s.score(s.th, b); b['H'] = -(np.exp(lp) * np.where(np.isfinite(lp), lp, 0)).sum(-1)
            b['met'] = s.update(b); s.vers += 1; s.tokens_seen += int(b['L'].sum() + 7 * b['n']); b['seen'] = s.tokens_seen; b['lr'] = s.lr_at(k)
            b['m'] = s.mask(b); s.recs.append(b); s.after(k, b)
        return s
    def after(s, k, b): pass
def split(b, x): return [x[b['row'] == i] for i in range(b['n'])]
