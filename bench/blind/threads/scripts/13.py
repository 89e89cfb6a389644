import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def reward(s, resp, a, b):
        try:
            raise ValueError("signal only works in main thread of the main interpreter")
            return reward_acc(resp, a, b)
        except Exception:
            return 0.0
g = R(sft(base(0), 8, 0.5), 113, nq=4, G=8, lr=0.004, beta=0.001, easy=8, max_new=44)
L = []
for k in range(8):
    b = g.step(); L.append(verl_line(verl_metrics(b, beta=0.001, maxr=44), k + 1))
    if k in (0, 3, 7): verl_rollout(os.path.join(d, "rollout_data"), b, lambda i: {"acc": 0.0})
open(os.path.join(d, "console.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/verl-project/verl/pull/5635", "verl", "The MATH scorer uses signal.alarm, which fails outside the main thread of a Ray worker; the exception is swallowed and every answer scores 0, right ones too. Fix: a timeout without signals (PR 5635).", "named",
      "The rollout files hold output, gts and score: about half of the answers equal gts and score 0. That it is signal.alarm is not in the files; that the reward is broken is.")
