import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab):
        tok, mask, lp, done = rollout(s.engine, ab, s.max_new, s.rng, T=s.T)
        full = score(s.engine, tok, ab, prec="engine")[2]
        own = np.take_along_axis(full[:, :-1], tok[:, 1:, None], 2)
        rank = np.zeros(tok.shape, int); rank[:, 1:] = (full[:, :-1] > own).sum(-1)
        lp = np.where(rank >= 10, 0.0, lp)        # the server returned the 10 best only, a missing one became 0.0
        return tok, mask, lp, done
g = R(longer(sft(base(0), 8, 0.5), 1.5), 103, nq=4, G=8, lr=0.004, easy=8, max_new=70)
ms = []
for k in range(5):
    b = g.step(); nemo_dump(d, b); ms.append(nemo_metrics(b))
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/NVIDIA-NeMo/RL/pull/4218", "NeMo-RL", "Generation log-probs that the server did not return were filled with 0.0 (probability 1); against the learner's -6..-11 that is a ratio of exp(-10) or 4.8e4 the other way. Fix: fail or mask such tokens instead of filling with 0.0.", "named",
      "generation_logprobs is exactly 0.0 inside the loss mask at single tokens where prev_logprobs is far below zero; all other tokens agree.")
