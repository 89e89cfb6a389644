import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(sft(base(0), 7, 0.5), 117, nq=8, G=8, lr=0.004, beta=0.01, easy=7, max_new=44, minib=2)
L = []
for k in range(30): b = g.step(); L.append(verl_line(verl_metrics(b, beta=0.01, maxr=44), k + 1))
open(os.path.join(d, "verl_console.log"), "w").write("\n".join(L) + "\n")
truth(N, "look-alike of https://github.com/verl-project/verl/issues/781 and stale-engine threads", "verl", "Healthy: noisy reward that rises, KL that grows with it, entropy that falls, probs diff flat at noise.", "healthy", "The score rises, rollout_probs_diff stays at numerical noise, gradient norms are ordinary.")
