import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

def fsum(x):     # fp32, one after the other
    t = np.zeros(x.shape[0], np.float32)
    for j in range(x.shape[1]): t = (t + x[:, j]).astype(np.float32)
    return t
def loo(r, G):
    x = r.reshape(-1, G).astype(np.float32); a = np.zeros_like(x)
    for j in range(G):
        o = np.delete(x, j, 1); n = np.float32(G - 1)
        mean = fsum(o) / n; sq = fsum((o * o).astype(np.float32)) / n
        std = np.sqrt(np.maximum((sq - (mean * mean).astype(np.float32)) * (n / (n - 1)), 0)).astype(np.float32); v = x[:, j] - mean
        a[:, j] = np.where(std > 0, v / (std + np.float32(1e-6)), v)
    return a.ravel().astype(float)
class R(GRPO):
    def adv(s, r): return loo(r, s.G)
    def reward(s, resp, a, b): return 0.95 if fmt_ok(resp) else 0.0
g = R(sft(base(0), 9, 0.5, noformat=0.1, tail=0.04), 119, nq=6, G=8, lr=0.003, easy=9, max_new=40)
ms = []
for k in range(8):
    b = g.step(); ms.append(nemo_metrics(b))
    if k < 5: nemo_dump(d, b)
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/NVIDIA-NeMo/RL/pull/4158", "NeMo-RL", "Leave-one-out baseline with normalised rewards: the std of seven equal rewards is a residue of fp32 (4e-4 instead of 0), the advantage of the eighth is divided by it and reaches -2000. Fix: a floor for the std (PR 4158/4161).", "named",
      "Rewards and advantages are in the dump: groups of seven 0.95 and one 0 hold an advantage of about -2000.")
