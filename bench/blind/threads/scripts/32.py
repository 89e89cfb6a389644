import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab):
        if not hasattr(s, "cache"): s.cache = s.m.M.copy()
        return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, M_of_step=s.cache)        # prompt blocks filled by the first weights
g = R(longer(sft(base(0), 7, 0.5), 0.8), 132, nq=4, G=8, lr=0.008, easy=6, max_new=52)
L = []
for k in range(26):
    b = g.step(); L.append(prime_line(b, f"11:{k:02d}:41"))
    if k in (0, 5, 13, 25): prime_export(os.path.join(d, "token_exports"), b)
open(os.path.join(d, "trainer.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/PrimeIntellect-ai/prime-rl/pull/1650", "prime-rl", "vLLM's prefix cache is kept over weight updates: the KV of the prompts comes from old weights, so the mismatch grows inside the job. Fix: reset_prefix_cache after update_weights.", "likely",
      "The export of four steps shows a gap that is noise at step 1 and grows with the steps though the engine is synced each step; cached_tokens are not exported, so a stale cache can be told from stale weights only by size and place of the gap.")
