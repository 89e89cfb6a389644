import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(sft(base(0), 6, 0.93, iters=45), 104, nq=8, G=8, lr=0.002, beta=0.02, easy=6, max_new=40)
logs = []; nt = 0
for k in range(30):
    b = g.step(); nt += int(b["len"].sum()) + P * 64; b["ntok"] = nt
    logs.append(trl_log(b, 8, beta=0.02, total=120))
    if k in (4, 14, 24, 29): trl_parquet(d, b, {"accuracy_reward": b["rew"]}, {"solution": [str(int(x.sum())) for x in b["ab"]]})
trl_state(d, logs, 120, 8)
truth(N, "look-alike of https://github.com/modelscope/ms-swift/issues/4547 (equal rewards)", "TRL", "Healthy: a policy that already solves most prompts; many groups have equal rewards because all are right, the rest still teach, KL and sampler gap small.", "healthy", "Rewards are high, not constant; right answers score 1 and wrong ones 0; sampler and learner agree.")
