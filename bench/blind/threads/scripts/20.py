import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

def rw(resp, a, b):
    x = answer(resp)
    return np.nan if x is None else float(x == a + b)       # the plugin returns None when it cannot parse
class R(GRPO):
    def rewards(s, tok, mask, ab): return np.array([rw(tok[i][mask[i] > 0], *ab[i]) for i in range(len(tok))])
    def grads(s, g):
        return g
class Skip(Adam):
    def step(s, model, g, lr=None):
        if not np.all([np.isfinite(x).all() for x in g.values()]): return float("nan")   # DeepSpeed skips the step
        return super().step(model, g, lr)
g = R(sft(base(0), 8, 0.5, tail=0.02, noformat=0.02), 120, nq=3, G=8, lr=0.004, easy=8, max_new=40); g.opt = Skip(0.004)
rows, logs = [], []
for k in range(14):
    b = g.step(); rows.append(swift_row(b, {"MyAccuracy": b["rew"]}))
    o = trl_log(b, 8, names=("MyAccuracy",), total=300, sampler=False)
    if np.isnan(b["loss"]): o["loss"] = 0.0                 # logging_nan_inf_filter of the HF trainer
    o["reward_std"] = float(group_std(b, 8).mean()); logs.append(swift_log(o, k + 1, 300))
jl(os.path.join(d, "completions.jsonl"), rows); jl(os.path.join(d, "logging.jsonl"), logs)
truth(N, "https://github.com/modelscope/ms-swift/issues/8123", "ms-swift", "The custom reward returns None for what it cannot parse; one such sample makes the rewards, advantages and gradient of the batch NaN (loss is shown as 0 by the trainer's NaN filter). Fix: return 0.0, or nansum.", "named",
      "completions.jsonl holds the NaN reward of single completions (no parseable answer) and NaN advantages of their group; grad_norm is NaN in just those steps.")
