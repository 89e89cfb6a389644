import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

m = sft(base(0), 5, 0.85, iters=60, noformat=0.0, tail=0.0, pfill=0.12); m.W *= np.float32(1.15)
g = GRPO(m, 130, nq=5, G=8, lr=0.001, easy=5, max_new=40)
rows, logs = [], []
for k in range(10):
    b = g.step(); rows.append(swift_row(b, {"MathAccuracy": b["rew"]})); logs.append(swift_log(trl_log(b, 8, names=("MathAccuracy",), total=200, sampler=False), k + 1, 200))
jl(os.path.join(d, "completions.jsonl"), rows); jl(os.path.join(d, "logging.jsonl"), logs)
truth(N, "look-alike of https://github.com/modelscope/ms-swift/pull/7858", "ms-swift", "Healthy: a converged policy of low entropy with short answers; many samples of a group have equal text by chance, as the entropy allows, the others differ.", "healthy", "Duplicates are as frequent as the entropy per completion predicts; rewards are high and groups with a wrong answer still teach.")
