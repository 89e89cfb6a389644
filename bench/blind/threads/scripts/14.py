import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, eos=(PAD,))   # end of turn is not known as end
g = R(sft(base(0), 8, 0.5), 114, nq=4, G=8, lr=0.003, easy=8, max_new=72)
logs = []; nt = 0
for k in range(12):
    b = g.step(); nt += int(b["len"].sum()) + P * 32; b["ntok"] = nt; logs.append(trl_log(b, 8, total=200, sampler=False))
    if k in (0, 5, 11): trl_parquet(d, b, {"accuracy_reward": b["rew"]})
trl_state(d, logs, 200, 8)
truth(N, "https://github.com/huggingface/trl/releases/tag/v1.14.2", "TRL", "The end-of-turn token is not known as EOS: generation runs on after the answer into invented turns until the length limit, and those ids are in the loss. Fix: pass the end-of-turn token as stop/EOS (TRL 1.14.2, #7039).", "named",
      "clipped_ratio is 1 and the completions go on after a complete </answer> with text that has nothing to do with the prompt (special tokens are not in the decoded text).")
