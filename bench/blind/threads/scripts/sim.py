"""A toy language model with an exact policy gradient, and the pieces of a GRPO trainer around it."""
import os, json, numpy as np

NUM = [str(i) for i in range(40)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant"]
WORDS = ("What is + ? <think> </think> <answer> </answer> = . , let us check that again we add the tens first so sum wait "
         "maybe not looks right now carry one step : good ok hmm then write down result see it first, number tool").split()
VOC = SPECIAL + WORDS + NUM
VOC = list(dict.fromkeys(VOC))
ID = {w: i for i, w in enumerate(VOC)}
V = len(VOC)
PAD, IMS, EOS = 0, 1, 2
ISNUM = np.array([w in set(NUM) for w in VOC])
FILL = [s.split() for s in ["let us check that again .", "we add the tens first .", "so the sum is {c} .", "wait , maybe not .",
                            "it looks right .", "now carry the one .", "then write down the result .", "hmm , let us see .", "{a} + {b} = {c} ."]]
D1, D2, D3, DS, DA, DP, DV, DN = 33, 20, 12, 20, 8, 8, 16, 20
D = D1 + D2 + D3 + DS + 2 * DA + DP + DV + DN + 1


def bf16(x):
    x = np.ascontiguousarray(x, np.float32)
    u = x.view(np.uint32)
    r = ((u >> 16) & 1) + 0x7FFF
    return ((u + r) & 0xFFFF0000).view(np.float32)


class Emb:
    def __init__(s, seed):
        r = np.random.default_rng(seed)
        n = lambda *sh: (r.normal(size=sh) / np.sqrt(sh[-1]) * 2).astype(np.float32)
        s.E1 = np.concatenate([n(V, D1 - 1), ISNUM[:, None] * 1.5], 1).astype(np.float32); s.E2 = n(V, D2); s.E3 = n(V, D3)
        s.S = n(80, DS); s.A = n(40, DA); s.B = n(40, DA); s.N = n(41, DN)


class Model:
    """params: W [V, D], M [V, DV]; LoRA: W + scale * Bl @ Al."""
    def __init__(s, emb, W, M, Al=None, Bl=None, scale=1.0):
        s.emb, s.W, s.M, s.Al, s.Bl, s.scale = emb, W, M, Al, Bl, scale

    def copy(s):
        c = lambda x: None if x is None else x.copy()
        return Model(s.emb, c(s.W), c(s.M), c(s.Al), c(s.Bl), s.scale)

    def lora(s, r, seed, scale=2.0):
        g = np.random.default_rng(seed)
        s.Al = (g.normal(size=(r, D)) / np.sqrt(D)).astype(np.float32); s.Bl = np.zeros((V, r), np.float32); s.scale = scale
        return s

    def eff(s):
        return s.W if s.Al is None else s.W + s.scale * s.Bl @ s.Al

    def names(s):
        return ["W", "M"] if s.Al is None else ["Al", "Bl"]


def posf(t, scale=1.0):
    t = np.asarray(t, float) * scale
    f = np.array([3., 12., 48., 200.])
    return np.concatenate([np.sin(t[..., None] / f), np.cos(t[..., None] / f)], -1).astype(np.float32) * np.float32(0.7)


def prompt_tokens(a, b):
    return [ID[w] for w in ["<|im_start|>", "user", "\n", "What", "is", NUM[a], "+", NUM[b], "?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]]


P = 14


def lastnum(tok):
    """index of the last number in the response so far (40 = none)."""
    B, L = tok.shape
    out = np.full((B, L), 40)
    cur = np.full(B, 40)
    for t in range(L):
        if t >= P:
            m = ISNUM[tok[:, t]]
            cur = np.where(m, tok[:, t] - ID["0"], cur)
        out[:, t] = cur
    return out


def features(model, tok, ab, posscale=1.0, Mhist=None):
    """phi[b, t] predicts token t+1. Mhist: [B, L] index list of value tables (stale KV), else the model's own M."""
    e = model.emb
    B, L = tok.shape
    p1 = np.concatenate([np.zeros((B, 1), int), tok[:, :-1]], 1)
    p2 = np.concatenate([np.zeros((B, 2), int), tok[:, :-2]], 1)
    vals = model.M[tok] if Mhist is None else Mhist
    v = np.cumsum(vals, 1) / np.sqrt(np.arange(1, L + 1, dtype=np.float32))[None, :, None]
    a, b = ab[:, 0], ab[:, 1]
    rep = lambda x: np.repeat(x[:, None], L, 1)
    return np.concatenate([e.E1[tok], e.E2[p1], e.E3[p2], rep(e.S[a + b]), rep(e.A[a]), rep(e.B[b]),
                           np.broadcast_to(posf(np.arange(L), posscale), (B, L, DP)), v, e.N[lastnum(tok)], np.ones((B, L, 1), np.float32)], -1)


def logsoftmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def logits(model, tok, ab, prec="train", **kw):
    ph = features(model, tok, ab, **kw)
    W = model.eff()
    if prec == "train":      # bf16 activations, fp32 head
        return bf16(ph) @ W.T, ph
    if prec == "engine":     # bf16 weights and activations, split accumulation
        h = D // 2
        q, w = bf16(ph), bf16(W)
        return bf16(q[..., :h] @ w[:, :h].T) + bf16(q[..., h:] @ w[:, h:].T), ph
    if prec == "bf16logits":
        return bf16(bf16(ph) @ bf16(W).T), ph
    return ph @ W.T, ph


def score(model, tok, ab, T=1.0, prec="train", **kw):
    """log-prob of tok[:, t] at place t (0 at t=0), entropy of the distribution that made it, full log-probs."""
    z, ph = logits(model, tok, ab, prec, **kw)
    lp = logsoftmax(z / T)
    B, L = tok.shape
    out = np.zeros((B, L)); ent = np.zeros((B, L))
    out[:, 1:] = np.take_along_axis(lp[:, :-1], tok[:, 1:, None], 2)[..., 0]
    ent[:, 1:] = -(np.exp(lp[:, :-1]) * lp[:, :-1]).sum(-1)
    return out, ent, lp, ph


def rollout(model, ab, max_new, rng, T=1.0, prec="engine", eos=(EOS,), transform=None, posscale=1.0, prefix=None, lp_mode="processed",
            M_of_step=None, uniforms=None):
    """returns tok [B, P+max_new], mask (1 on sampled tokens), logp of the engine, finished. transform(z, tok_so_far) changes the logits."""
    B = len(ab)
    tok = np.zeros((B, P + max_new), int)
    start = P
    if prefix is None:
        tok[:, :P] = [prompt_tokens(a, b) for a, b in ab]
    else:
        start = prefix.shape[1]; tok[:, :start] = prefix
    mask = np.zeros(tok.shape, int); lp = np.zeros(tok.shape); done = np.zeros(B, bool)
    e = model.emb; W = model.eff(); 
    if prec == "engine": W = bf16(W)
    elif prec == "bf16logits": W = bf16(W)
    M0 = model.M if M_of_step is None else M_of_step
    vs = M0[tok[:, :start]].sum(1)
    ln = lastnum(tok[:, :start])[:, -1]
    h = D // 2
    for t in range(start, P + max_new):
        x, p1, p2 = tok[:, t - 1], tok[:, t - 2], tok[:, t - 3]
        ph = np.concatenate([e.E1[x], e.E2[p1], e.E3[p2], e.S[ab.sum(1)], e.A[ab[:, 0]], e.B[ab[:, 1]],
                             np.broadcast_to(posf(t - 1, posscale), (B, DP)), vs / np.float32(np.sqrt(t)), e.N[ln], np.ones((B, 1), np.float32)], -1)
        if prec == "engine":
            q = bf16(ph); z = bf16(q[:, :h] @ W[:, :h].T) + bf16(q[:, h:] @ W[:, h:].T)
        else:
            z = ph @ W.T
        zs = z if transform is None else transform(z, tok[:, :t])
        ls = logsoftmax(zs / T)
        u = rng.random(B) if uniforms is None else uniforms[:, t - start]
        c = np.cumsum(np.exp(ls), 1)
        y = np.minimum((c < u[:, None] * c[:, -1:]).sum(1), V - 1)
        l = ls if lp_mode == "processed" else logsoftmax(z)
        live = ~done
        tok[live, t] = y[live]; mask[live, t] = 1
        lp[live, t] = l[np.arange(B), y][live]
        vs = vs + model.M[tok[:, t]]
        ln = np.where(live & ISNUM[tok[:, t]], tok[:, t] - ID["0"], ln)
        done |= live & np.isin(y, eos)
        if done.all(): break
    return tok, mask, lp, done


def grad(model, ph, lp, tok, coef, ent_coef=None):
    """gradient of sum(coef * logp + ent_coef * entropy) by W and M."""
    B, L = tok.shape
    p = np.exp(lp[:, :-1])
    c = coef[:, 1:].astype(np.float32)
    dz = -p * c[..., None]
    np.put_along_axis(dz, tok[:, 1:, None], np.take_along_axis(dz, tok[:, 1:, None], 2) + c[..., None], 2)
    if ent_coef is not None:
        H = -(p * lp[:, :-1]).sum(-1, keepdims=True)
        dz += ent_coef[:, 1:, None].astype(np.float32) * (-p * (lp[:, :-1] + H))
    f = ph[:, :-1]
    dW = dz.reshape(-1, V).T @ f.reshape(-1, D)
    off = D1 + D2 + D3 + DS + 2 * DA + DP
    dv = (dz @ model.eff()[:, off:off + DV]) / np.sqrt(np.arange(1, L, dtype=np.float32))[None, :, None]
    acc = np.ascontiguousarray(np.cumsum(dv[:, ::-1], 1)[:, ::-1]).reshape(-1, DV)
    idx = tok[:, :-1].ravel()
    dM = np.stack([np.bincount(idx, acc[:, j], V) for j in range(DV)], 1).astype(np.float32)
    if model.Al is None:
        return {"W": dW, "M": dM}
    return {"Al": model.scale * model.Bl.T @ dW, "Bl": model.scale * dW @ model.Al.T}


class Adam:
    def __init__(s, lr, b1=0.9, b2=0.99, clip=1.0):
        s.lr, s.b1, s.b2, s.clip, s.m, s.v, s.t = lr, b1, b2, clip, {}, {}, 0

    def step(s, model, g, lr=None):
        """g: gradient of the LOSS. returns the norm before clipping."""
        n = np.sqrt(sum((x ** 2).sum() for x in g.values()))
        k = min(1.0, s.clip / (n + 1e-6)) if s.clip else 1.0
        s.t += 1
        for a, x in g.items():
            x = x * k
            s.m[a] = s.b1 * s.m.get(a, 0) + (1 - s.b1) * x
            s.v[a] = s.b2 * s.v.get(a, 0) + (1 - s.b2) * x * x
            d = s.m[a] / (1 - s.b1 ** s.t) / (np.sqrt(s.v[a] / (1 - s.b2 ** s.t)) + 1e-8)
            setattr(model, a, (getattr(model, a) - (s.lr if lr is None else lr) * d).astype(np.float32))
        return float(n)


def longer(m, by=1.2):
    """the same model with a habit of thinking longer."""
    m = m.copy(); m.W[ID["</think>"], -1] -= by; return m


def one_response(r, a, b, acc, pfill, empty=0.0, tail=0.06, noformat=0.08):
    s = a + b
    c = s if r.random() < acc else int(np.clip(s + r.choice([-3, -2, -1, 1, 2, 3, 10, -10]), 0, 39))
    out = []
    if r.random() < noformat:
        out += ["so", "the", "sum", "is", NUM[c], "."]
    else:
        out += ["<think>", NUM[a], "+", NUM[b], "=", NUM[c], "."]
    while r.random() < pfill:
        out += [w.format(a=a, b=b, c=c) for w in FILL[r.integers(len(FILL))]]
    if out[0] == "<think>": out += ["</think>"]
    if r.random() < empty: out += ["<answer>", "</answer>"]
    else:
        out += ["<answer>", NUM[c], "</answer>"] if r.random() > tail else ["<answer>", NUM[c], ".", "wait", ",", "maybe", "not", "</answer>"]
    if r.random() < tail: out += ["ok", "."]
    return [ID[w] for w in out] + [EOS]


def base(seed=0, acc=0.5, pfill=0.45, iters=450, empty=0.0, tail=0.06, L=None, noformat=0.08):
    """a 'pretrained' model, cached outside of the cases."""
    key = os.environ["BLIND_OUT"] + f"/t34_base_{seed}_{acc}_{pfill}_{iters}_{empty}_{tail}_{L}_{noformat}.npz"
    emb = Emb(1000 + seed)
    r = np.random.default_rng(2000 + seed)
    L = L or (P + (56 if pfill < 0.7 else 150))
    if os.path.exists(key):
        d = np.load(key); return Model(emb, d["W"].astype(np.float32), d["M"].astype(np.float32))
    m = Model(emb, np.zeros((V, D)), r.normal(size=(V, DV)) * 0.3)
    opt = Adam(0.05, clip=0)
    nb = 48 if pfill < 0.7 else 20
    for it in range(iters):
        ab = r.integers(1, 20, (nb, 2)); tok = np.zeros((nb, L), int); mask = np.zeros((nb, L))
        for i, (a, b) in enumerate(ab):
            s = prompt_tokens(a, b) + one_response(r, a, b, acc, pfill, empty, tail, noformat)
            if r.random() < 0.3:
                x, y = r.integers(1, 20, 2)
                s += [ID["\n"]] + prompt_tokens(x, y) + one_response(r, x, y, acc, pfill, empty, tail, noformat)
            s = s[:L]; tok[i, :len(s)] = s; mask[i, P:len(s)] = 1
        _, _, lp, ph = score(m, tok, ab, prec="fp")
        g = grad(m, ph, lp, tok, -mask / mask.sum())
        opt.step(m, g, lr=0.05 * (1 - it / iters) + 0.002)
    np.savez(key, W=m.W, M=m.M)
    return m


def text(ids):
    out = ""
    for i in ids:
        w = VOC[i]
        if w in ("\n",): out = out.rstrip(" ") + "\n"
        elif w.startswith("<|"): out = out.rstrip(" ") + w
        elif w in (".", ",", "?", ":"): out = out.rstrip(" ") + w + " "
        else: out += w + " "
    return out.strip(" ")


def answer(resp):
    """number between <answer> and </answer>, or None."""
    r = [VOC[i] for i in resp]
    if "<answer>" in r:
        k = r.index("<answer>")
        if k + 1 < len(r) and r[k + 1] in NUM and k + 2 < len(r) and r[k + 2] == "</answer>": return int(r[k + 1])
    return None


def fmt_ok(resp):
    r = [VOC[i] for i in resp if i not in (EOS, PAD)]
    return bool(r) and r[0] == "<think>" and r.count("</think>") == 1 and r.count("<answer>") == 1 and r[-1] == "</answer>"


def reward_acc(resp, a, b):
    return 1.0 if answer(resp) == a + b else 0.0


def group_adv(r, G, std=True, eps=1e-6):
    x = r.reshape(-1, G)
    s = x.std(1, ddof=1, keepdims=True) if std else 1.0
    return ((x - x.mean(1, keepdims=True)) / (s + eps if std else 1.0)).ravel()


class GRPO:
    """one process of policy, reference and engine; subclasses put the fault in."""
    def __init__(s, model, seed, nq=8, G=8, T=1.0, max_new=48, lr=0.01, beta=0.0, clip=0.2, minib=1, gclip=1.0, ent_coef=0.0, easy=None):
        s.m = model; s.ref = model.copy(); s.rng = np.random.default_rng(seed)
        s.nq, s.G, s.T, s.max_new, s.beta, s.clip, s.minib, s.ent_coef = nq, G, T, max_new, beta, clip, minib, ent_coef
        s.opt = Adam(lr, clip=gclip); s.k = 0; s.engine = model.copy(); s.hist = []; s.trainT = T; s.easy = easy
        s.sync()

    # --- places for faults
    def sync(s): s.engine = s.m.copy()
    def prompts(s):
        ab = s.rng.integers(1, 20 if s.easy is None else s.easy, (s.nq, 2)); return np.repeat(ab, s.G, 0)
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T)
    def reward(s, resp, a, b): return reward_acc(resp, a, b)
    def adv(s, r): return group_adv(r, s.G)
    def cur(s, tok, ab): return score(s.m, tok, ab, T=s.trainT)
    def old(s, tok, ab): return s.cur(tok, ab)
    def reflp(s, tok, ab): return score(s.ref, tok, ab, T=s.trainT)[0]
    def lossmask(s, mask, tok): return mask
    def klcoef(s, lp, ref, mask): return s.beta * (1 - np.exp(np.clip(ref - lp, -20, 20)))
    def weights(s, lm): return lm / lm.sum()
    def grads(s, g): return g
    def rewards(s, tok, mask, ab): return np.array([s.reward(tok[i][mask[i] > 0], *ab[i]) for i in range(len(tok))])

    def step(s):
        s.k += 1
        ab = s.prompts()
        tok, mask, slp, done = s.generate(ab)
        L = int(np.nonzero(mask.any(0))[0].max()) + 1
        tok, mask, slp = tok[:, :L], mask[:, :L], slp[:, :L]
        rew = s.rewards(tok, mask, ab)
        a = s.adv(rew)
        A = a[:, None] * np.ones(L) if a.ndim == 1 else a
        old, ent, _, _ = s.old(tok, ab)
        ref = s.reflp(tok, ab)
        lm = s.lossmask(mask, tok)
        gn, pk, cf, kl, ls, ratm = [], [], [], [], [], []
        order = s.rng.permutation(len(tok)) if s.minib > 1 else np.arange(len(tok))
        for idx in np.array_split(order, s.minib):
            lp, en, full, ph = s.cur(tok[idx], ab[idx])
            w = s.weights(lm[idx]); lr_ = lp - old[idx]; ra = np.exp(np.clip(lr_, -20, 20)); AA = A[idx]
            act = np.where(AA > 0, ra <= 1 + s.clip, ra >= 1 - s.clip)
            pg = -np.minimum(AA * ra, AA * np.clip(ra, 1 - s.clip, 1 + s.clip))
            k3 = np.exp(np.clip(ref[idx] - lp, -20, 20)) - (ref[idx] - lp) - 1
            co = w * (-AA * ra * act + s.klcoef(lp, ref[idx], lm[idx]))
            g = grad(s.m, ph, full, tok[idx], co / s.trainT, (-s.ent_coef * w / s.trainT) if s.ent_coef else None)
            gn.append(s.opt.step(s.m, s.grads(g)))
            ls.append((w * (pg + s.beta * k3)).sum()); pk.append(-(w * lr_).sum()); cf.append((w * (~act)).sum()); kl.append((w * k3).sum())
            ratm.append(((lm[idx] * ra).sum() / max(1, lm[idx].sum()), ra[lm[idx] > 0].min(), ra[lm[idx] > 0].max()))
        s.sync()
        mk = mask > 0
        b = dict(step=s.k, tok=tok, mask=mask, lm=lm, slp=slp, old=old, ref=ref, ent=ent, rew=rew, adv=a, A=A, ab=ab, done=done,
                 len=mask.sum(1), gn=float(np.mean(gn)), loss=float(np.mean(ls)), ppo_kl=float(np.mean(pk)), cf=float(np.mean(cf)),
                 kl=float(np.mean(kl)), entm=float(ent[mk].mean()), ratio=ratm, lr=s.opt.lr)
        return b


def sft(m, easy, acc, iters=25, n=24, lr=0.02, seed=9, **kw):
    """a little supervised training on small sums: a policy that is right with probability about acc."""
    key = os.environ["BLIND_OUT"] + f"/t34_sft_{easy}_{acc}_{iters}_{n}_{lr}_{seed}_{'_'.join(f'{k}{v}' for k, v in sorted(kw.items()))}.npz"
    if os.path.exists(key):
        z = np.load(key); return Model(m.emb, z["W"], z["M"])
    m = m.copy(); r = np.random.default_rng(seed); opt = Adam(lr, clip=0); L = P + 40
    a = dict(pfill=0.4, empty=0.0, tail=0.04, noformat=0.04); a |= kw
    for _ in range(iters):
        ab = r.integers(1, easy, (n, 2)); tok = np.zeros((n, L), int); mask = np.zeros((n, L))
        for i, (x, y) in enumerate(ab):
            s = (prompt_tokens(x, y) + one_response(r, x, y, acc, **a))[:L]; tok[i, :len(s)] = s; mask[i, P:len(s)] = 1
        _, _, lp, ph = score(m, tok, ab, prec="fp")
        opt.step(m, grad(m, ph, lp, tok, -mask / mask.sum()))
    np.savez(f"{key}.{os.getpid()}.npz", W=m.W, M=m.M); os.replace(f"{key}.{os.getpid()}.npz", key)
    return m


def group_std(b, G): return b["rew"].reshape(-1, G).std(1, ddof=1)
