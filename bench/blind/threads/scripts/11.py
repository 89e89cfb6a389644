import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def klcoef(s, lp, ref, mask): return s.beta * np.ones_like(lp)     # gradient of k1 = logp - ref
for beta in (0.01, 0.05, 0.2):
    g = R(sft(base(0), 7, 0.5), 111, nq=4, G=8, lr=0.006, beta=beta, easy=7, max_new=40); rows = []
    for k in range(12): b = g.step(); rows.append(oi_metrics(b, 8, beta, est=0))
    wandb_csv(os.path.join(d, f"grpo_fast_beta_{beta}.csv"), rows)
truth(N, "https://github.com/allenai/open-instruct/issues/534", "open-instruct", "The k1 estimator (kl_estimator 0) is used as a loss term: its gradient is zero in expectation, a mere noise that pushes sampled tokens down, so a larger beta does not hold the KL (in the thread it even grew). Fix: k3/k2 as the loss (kl_estimator 2), or k1 in the reward.", "likely",
      "Three runs differ in beta alone, by a factor of 20, and the KL is about the same in all: the penalty has no hold; loss/kl_avg equals beta * objective/kl0_avg, which tells the estimator used.")
