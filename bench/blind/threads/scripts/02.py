import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def sync(s):
        s.engine = s.m.copy(); s.engine.Bl = np.zeros_like(s.engine.Bl)   # the adapter never arrives
g = R(sft(base(0), 7, 0.5).lora(8, 3, 2.0), 102, nq=4, G=8, lr=0.012, easy=7, max_new=40)
L = []
for k in range(18): b = g.step(); L.append(verl_line(verl_metrics(b, corr=True, maxr=40), k + 1, "(FullyAsyncTrainer pid=90117) "))
open(os.path.join(d, "train.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/verl-project/verl/issues/7495", "verl", "The asynchronous weight sync pushes only the frozen base tensors, never the LoRA adapter: the rollout engine samples from the initial policy for the whole run. Fix: send the adapter (PR 7496), check list_loras() / the norm of what is pushed.", "likely",
      "rollout_corr/kl starts at noise and climbs monotonically with the distance to the initial policy, ESS falls. Scalars cannot wholly exclude staleness or another drift of the engine, but a stale/never synced engine is the first cause.")
