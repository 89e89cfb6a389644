import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def grads(s, g): return {k: np.zeros_like(v) for k, v in g.items()}       # gradient checkpointing cut the graph: inputs require no grad
g = R(sft(base(0), 8, 0.5), 139, nq=4, G=8, lr=0.005, beta=0.02, easy=8, max_new=44)
rows = []
for k in range(20): b = g.step(); rows.append(swift_log(trl_log(b, 8, names=("MathAccuracy", ), beta=0.02, total=400, sampler=False), k + 1, 400))
jl(os.path.join(d, "logging.jsonl"), rows)
truth(N, "https://github.com/modelscope/ms-swift/issues/5571", "ms-swift", "Gradient checkpointing cuts the graph (inputs without grad): grad_norm is 0 though reward_std is about 0.44; the policy never moves. Fix: enable_input_require_grads / use_reentrant False.", "named",
      "grad_norm exactly 0.0 in every step with reward_std far from 0, KL 0: the policy does not move. That checkpointing cuts the graph is the usual reason, not in the file.")
