import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def klcoef(s, lp, ref, mask): return -super().klcoef(lp, ref, mask)
g = R(sft(base(0), 7, 0.5), 136, nq=4, G=8, lr=0.01, beta=0.5, easy=7, max_new=48)
L = []
for k in range(17): b = g.step(); L.append(verl_line(verl_metrics(b, beta=0.5, rollout=False, maxr=48), k + 1, "(main_task pid=20931) "))
open(os.path.join(d, "logic_rl.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/Unakar/Logic-RL/issues/58", "verl fork (Logic-RL)", "With use_kl_loss the KL is subtracted from the loss instead of added: it is maximised, the policy collapses. Fix: policy_loss + kl_coef * kl_loss.", "no",
      "kl_loss grows fast with a large coefficient and the score falls; the log cannot separate a reversed sign from a step that is too big.")
