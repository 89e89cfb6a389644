import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def prompts(s):
        ab = s.rng.integers(1, 7, (s.nq, 2)); n = s.G - s.rng.binomial(3, 0.6, s.nq); s.groups = np.repeat(np.arange(s.nq), n); return np.repeat(ab, n, 0)
    def adv(s, r):   # counts differ -> one row over the whole batch
        return (r - r.mean()) / (r.std(ddof=1) + 1e-6)
g = R(sft(base(0), 7, 0.7, iters=35), 107, nq=4, G=8, lr=0.004, easy=7, max_new=40)
L = []
for k in range(4):
    b = g.step(); slime_pt(d, b, 8, groups=g.groups); L += slime_lines(b, 0.0, f"2026-08-14 09:1{k}:2{k}")
open(os.path.join(d, "slime.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/THUDM/slime/issues/2230", "slime", "With groups of unequal size the reward normalisation falls back to one row over the whole batch: advantages are not group-relative, groups with equal rewards get a gradient. Fix: normalise by group_index.", "named",
      "group_index, raw rewards and advantages are in the dumps: groups whose rewards are all equal have non-zero advantages, and the advantages are the batch's z-score.")
