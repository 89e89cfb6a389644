import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def sync(s):
        s.n = getattr(s, "n", -1) + 1; s.engine = s.m.copy()
        if s.n: s.engine.Bl = s.m.Bl * (1.16 ** 8) ** (s.n - 1)          # a shared buffer, scaled in place at every load
g = R(sft(base(0), 8, 0.5).lora(8, 4, 1.0), 128, nq=4, G=8, lr=0.012, beta=0.01, easy=8, max_new=56)
logs = []; nt = 0
for k in range(8):
    b = g.step(); nt += int(b["len"].sum()) + P * 32; b["ntok"] = nt; o = trl_log(b, 8, names=("correctness_reward_func",), beta=0.01, total=60); logs.append(o)
    trl_parquet(d, b, {"correctness_reward_func": b["rew"]})
trl_print(os.path.join(d, "stdout.txt"), logs)
truth(N, "https://github.com/unslothai/unsloth-zoo/pull/942", "Unsloth", "The adapter in vLLM is corrupted, not merely old: one LoRA matrix is never loaded and a shared buffer is scaled in place at every load (B grows by s^8 a step); rollouts rot to gibberish within five steps while the learner is sound. Fix: unsloth-zoo PR 942.", "likely",
      "sampling_logp_difference grows by a factor a step from step 3 and the completions decay, KL of the learner stays moderate: the sampler is not the learner. That the weights are corrupted instead of old follows from gibberish after few small updates.")
