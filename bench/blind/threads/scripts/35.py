import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    """fused head: 96 columns beyond the vocabulary, loaded as zeros, each adds exp(0) to the sum."""
    def cur(s, tok, ab):
        z, ph = logits(s.m, tok, ab); z = z.astype(float); off = 0.55 * z.max(-1, keepdims=True)
        lse = np.log(np.exp(z - off).sum(-1, keepdims=True)); full = z - off - np.logaddexp(lse, np.log(96.0))
        lp = np.zeros(tok.shape); ent = np.zeros(tok.shape); lp[:, 1:] = np.take_along_axis(full[:, :-1], tok[:, 1:, None], 2)[..., 0]
        ent[:, 1:] = (np.logaddexp(lse, np.log(96.0))[..., 0] - (np.exp(full) * (z - off)).sum(-1))[:, :-1]
        return lp, ent, full.astype(np.float32), ph
g = R(sft(base(0), 7, 0.5), 135, nq=4, G=8, lr=0.006, easy=7, max_new=44)
L = []
for k in range(18): b = g.step(); L.append(verl_line(verl_metrics(b, maxr=44), k + 1))
open(os.path.join(d, "train.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/verl-project/verl/issues/2656 (#2899, PR 5349)", "verl", "Fused linear cross entropy: the last tile reads columns beyond the vocabulary as zero logits, each adds exp(0) to logsumexp; the learner's log-probs and entropy are wrong from the first step. Fix: PR 5349, or use_fused_kernels=False.", "no",
      "rollout_probs_diff is large and the correlation bad from step 1, entropy too high for the sampled text: the learner's log-probs (or the sampler's) are wrong before any update. Scalars do not say which side nor why (temperature, kernel, layout).")
