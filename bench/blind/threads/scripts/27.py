import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(sft(base(0), 7, 0.5), 127, nq=6, G=8, lr=0.01, easy=7, max_new=56, ent_coef=1.0)
rows = []
for k in range(22):
    b = g.step(); o = verl_metrics(b, maxr=56); o["actor/entropy_loss"] = b["entm"]; rows.append({"step": k + 1, "data": o})
jl(os.path.join(d, "qwen_grpo.jsonl"), rows)
truth(N, "https://github.com/verl-project/verl/issues/781", "verl", "The entropy bonus (entropy_coeff, then on by default) outweighs the reward: entropy rises without bound and the policy dissolves. Fix: entropy_coeff=0.", "no",
      "Entropy rises, responses run to the limit and the reward falls to 0, sampler and learner agree; scalars cannot tell an entropy bonus from a learning rate that is too high or a reversed sign. Best reading: drift/step too big; look at entropy_coeff.")
