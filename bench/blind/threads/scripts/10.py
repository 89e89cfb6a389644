import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

def topp(z, tok, p=0.9):
    l = logsoftmax(z); o = np.argsort(-l, 1); s = np.take_along_axis(np.exp(l), o, 1); keep = (np.cumsum(s, 1) - s) < p
    k = np.zeros(z.shape, bool); np.put_along_axis(k, o, keep, 1)
    return np.where(k, z, -1e9)
class R(GRPO):
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, transform=topp)
g = R(sft(base(0), 8, 0.5), 110, nq=4, G=8, lr=0.0015, easy=8, max_new=44)
logs = []; nt = 0
for k in range(15):
    b = g.step(); nt += int(b["len"].sum()) + P * 32; b["ntok"] = nt; logs.append(trl_log(b, 8, total=100))
trl_print(os.path.join(d, "train_output.txt"), logs)
truth(N, "https://github.com/huggingface/trl/issues/6789", "TRL", "top_p is set: vLLM's log-probs are normalised over the kept tokens, the trainer's over the whole vocabulary, so the importance ratio is biased to the kept mass (about 0.965 here) though nothing was updated. Fix: renormalise the trainer's log-probs over the kept set (PR 7269) or top_p=1.", "no",
      "From step 1 importance_sampling_ratio/mean is below 1 by a constant amount with max near 1 (the sampler is never less sure): points to a truncation or transform of the sampler; but scalars without the config cannot tell top_p from top_k, min_p or a temperature.")
