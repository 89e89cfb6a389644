import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def cur(s, tok, ab):
        lp, ent, full, ph = score(s.m, tok, ab, T=1.0); return lp / 0.7, ent, full, ph
g = R(longer(sft(base(0), 8, 0.5), 0.8), 122, nq=4, G=8, T=0.7, lr=0.002, easy=9, max_new=56)
for k in range(4):
    b = g.step()
    if k in (0, 1, 3): prime_export(os.path.join(d, "token_exports"), b)
truth(N, "https://github.com/PrimeIntellect-ai/prime-rl/pull/697", "prime-rl", "The trainer divides the LOG-PROBS by the temperature instead of the logits: they are not normalised, so the trainer is below the sampler at T=0.7 everywhere. Fix: logits / T before log_softmax.", "likely",
      "Both log-probs and the entropy are exported from step 0: trainer log-probs are below the sampler's on nearly all tokens, ratio mean far below 1: a temperature fault on the trainer's side; that it is a division after the softmax needs the identity trainer = logp(T=1)/T.")
