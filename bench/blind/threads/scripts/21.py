import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def sync(s):
        s.n = getattr(s, "n", 0) + 1
        if s.n == 1: s.disk = s.m.copy()
        s.engine = s.m.copy() if s.n <= 2 else s.disk      # wakes up from level 2 with the weights it was loaded with
g = R(sft(base(0), 8, 0.5), 121, nq=4, G=8, lr=0.009, beta=0.0, easy=8, max_new=44)
logs = []; nt = 0
for k in range(18):
    b = g.step(); nt += int(b["len"].sum()) + P * 32; b["ntok"] = nt; logs.append(trl_log(b, 8, total=200))
trl_state(d, logs, 200, 8)
truth(N, "https://github.com/huggingface/trl/issues/5312", "TRL", "vLLM colocate with sleep level 2 wakes up with the weights it was loaded with: from step 3 on the sampler is the initial policy. Fix: reload weights after wake-up (PR 5313) or sleep level 1.", "likely",
      "sampling_logp_difference is at noise for two steps and then grows with the distance of the learner, reward flat. A sampler that is not synced is the first cause; the log cannot exclude others.")
