import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab):   # eight engines, each one answers one sample of every prompt, all with the same seed
        u = np.repeat(s.rng.random((s.nq, s.max_new)), s.G, 0)
        return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, uniforms=u)
g = R(sft(base(0), 8, 0.5), 105, nq=5, G=8, lr=0.004, easy=8, max_new=48)
rows, logs = [], []
for k in range(8):
    b = g.step(); rows.append(swift_row(b, {"MathAccuracy": b["rew"]})); logs.append(swift_log(trl_log(b, 8, names=("MathAccuracy",), total=200, sampler=False), k + 1, 200))
jl(os.path.join(d, "completions.jsonl"), rows); jl(os.path.join(d, "logging.jsonl"), logs)
truth(N, "https://github.com/modelscope/ms-swift/pull/7858", "ms-swift", "Every rollout engine was started with the same seed, so the samples of a group are copies of one another: zero reward std, zero advantage, nothing is learnt although entropy is high. Fix: seed + engine rank.", "named",
      "All completions of a group are identical in text while the entropy per token is 0.3 to 0.7 nats over tens of tokens: impossible for independent samples.")
