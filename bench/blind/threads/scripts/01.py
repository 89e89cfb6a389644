import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

U2 = [ID[x] for x in "\n <|im_start|> user \n wait , let us check that again . <|im_end|> \n <|im_start|> assistant \n".replace("\n", "NL").split() for x in [x.replace("NL", "\n")]]
class R(GRPO):
    """two turns; at the second the server's chat template drops the earlier <think> block, the trainer scores the whole dialogue."""
    def generate(s, ab):
        B = len(ab); t1, m1, l1, d1 = rollout(s.engine, ab, 40, s.rng, T=s.T)
        W = P + 110; tok = np.zeros((B, W), int); mask = np.zeros((B, W), int); lp = np.zeros((B, W)); done = np.zeros(B, bool)
        for i in range(B):
            n = int(np.nonzero(m1[i])[0].max()) + 1; r1 = list(t1[i][P:n]); full = list(t1[i][:n]) + U2
            e = ID["</think>"]
            kept = r1[r1.index(e) + 1:] if e in r1 else r1
            pre = np.array([list(t1[i][:P]) + kept + U2])
            t2, m2, l2, d2 = rollout(s.engine, ab[i:i + 1], pre.shape[1] - P + 40, s.rng, T=s.T, prefix=pre)
            k = m2[0] > 0; r2 = t2[0][k]; L = len(full) + len(r2)
            tok[i, :L] = full + list(r2); mask[i, P:n] = 1; mask[i, len(full):L] = 1
            lp[i, P:n] = l1[i][P:n]; lp[i, len(full):L] = l2[0][k]; done[i] = d2[0]
        return tok, mask, lp, done
    def reward(s, resp, a, b):
        k = [i for i, x in enumerate(resp) if x == EOS]
        return reward_acc(resp[k[0] + 1:] if len(k) > 1 else resp, a, b)
g = R(sft(base(0), 8, 0.5), 101, nq=4, G=6, lr=0.005, easy=8)
log = []
for k in range(4):
    b = g.step(); log.append(prime_line(b, f"18:0{k}:{11 + 9 * k}"))
    if k in (1, 3): prime_export(os.path.join(d, "token_exports"), b)
open(os.path.join(d, "trainer.log"), "w").write("\n".join(log) + "\n")
truth(N, "https://github.com/PrimeIntellect-ai/prime-rl/issues/1334", "prime-rl", "Multi-turn rollouts: the chat template of Qwen3 strips the thinking of earlier turns when the second turn is sampled, the trainer scores the full history. The second turn was sampled under another prompt than it is scored under. Fix: a template that keeps past thinking / token-in token-out / one training row per turn.", "likely",
      "The export shows both log-probs: the first sampled segment agrees, the second does not. That the context differed (and not e.g. a cache or a position fault) is an inference; the prompt ids of the engine are not in the file.")
