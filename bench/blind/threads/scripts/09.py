import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def sync(s):
        s.q = getattr(s, "q", []) + [s.m.copy()]; s.engine = s.q[-2] if len(s.q) > 1 else s.q[-1]; s.q = s.q[-3:]
g = R(sft(base(0), 8, 0.5), 109, nq=4, G=8, lr=0.0025, easy=8, max_new=44)
L = []
for k in range(10):
    b = g.step(); L.append(prime_line(b, f"07:2{k}:05"))
    if k in (3, 6, 9): prime_export(os.path.join(d, "token_exports"), b)
open(os.path.join(d, "trainer.log"), "w").write("\n".join(L) + "\n")
truth(N, "look-alike of https://github.com/PrimeIntellect-ai/prime-rl/pull/1650 (mismatch)", "prime-rl", "Healthy: asynchronous training, the sampler is one optimizer step behind by design; the mismatch is small and does not grow.", "healthy", "Mismatch KL stays small and flat, gap symmetric, no dependence on position or log-prob beyond a one step lag.")
