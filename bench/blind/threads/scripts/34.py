import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def reward(s, resp, a, b): return 10.0 * reward_acc(resp, a, b)
g = R(longer(sft(base(0), 8, 0.5), 1.2), 134, nq=4, G=8, lr=0.003, beta=0.01, easy=9, max_new=48)
rows = []
for k in range(20):
    b = g.step(); rows.append(oi_metrics(b, 8, 0.01))
    if k % 5 == 0: oi_traces(os.path.join(d, "rlvr_math_rollouts_000000.jsonl"), b, 8)
wandb_csv(os.path.join(d, "wandb_export.csv"), rows)
truth(N, "look-alike of https://github.com/allenai/open-instruct/issues/534 and cut-off threads", "open-instruct", "Healthy: sparse rewards of 10, some answers cut off, KL grows slowly.", "healthy", "Rewards match the answers, advantages are group-relative, vllm_vs_local difference is noise, scores do not fall.")
