import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(sft(base(0), 5, 0.85, iters=60, noformat=0.0, tail=0.0, pfill=0.12), 131, nq=6, G=8, lr=0.003, beta=0.04, easy=5, max_new=40); g.ref = base(0)    # adapter off = the base, not the SFT adapter
logs = []; nt = 0
for k in range(16):
    b = g.step(); nt += int(b["len"].sum()) + P * 48; b["ntok"] = nt; logs.append(trl_log(b, 8, beta=0.04, total=80, sampler=False))
trl_state(d, logs, 80, 8)
truth(N, "https://github.com/huggingface/trl/pull/4723 (#3194)", "TRL", "GRPO continues an SFT adapter; the reference is the model with the adapter switched off, that is the base and not the SFT policy: the KL is high at the first step and pulls the run back to the base. Fix: a copy of the SFT adapter as reference (PR 4723).", "likely",
      "kl is far from 0 at step 1 while no update has been made and the policy ratio is 1. A wrong reference is the first cause, dropout while scoring the second.")
