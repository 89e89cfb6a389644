import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

TOOL = [ID[x] for x in "tool : the sum is".split()]
class R(GRPO):
    """answer, then a tool returns text into the response, then a last answer; the mask does not exclude the tool's text."""
    def generate(s, ab):
        B = len(ab); t1, m1, l1, d1 = rollout(s.engine, ab, 30, s.rng, eos=(EOS,)); W = P + 84
        tok = np.zeros((B, W), int); lp = np.zeros((B, W)); n1 = m1.sum(1); s.own = np.zeros((B, W), int); mask = np.zeros((B, W), int); done = np.ones(B, bool)
        for i in range(B):
            obs = [ID["\n"]] + TOOL + [ID[NUM[int(np.clip(ab[i].sum() + s.rng.integers(-1, 2), 0, 39))]], ID["."]] + [ID[x] for x in FILL[s.rng.integers(6)] if x in ID] + [ID["\n"], IMS, ID["assistant"], ID["\n"]]
            pre = np.array([list(t1[i][:P + n1[i]]) + obs]); q = pre.shape[1]
            t2, m2, l2, _ = rollout(s.engine, ab[i:i + 1], q - P + 24, s.rng, prefix=pre)
            k = m2[0] > 0; L = q + k.sum(); tok[i, :q] = pre[0]; tok[i, q:L] = t2[0][k]; mask[i, P:L] = 1
            lp[i, P:P + n1[i]] = l1[i][P:P + n1[i]]; lp[i, q:L] = l2[0][k]; s.own[i, P:P + n1[i]] = 1; s.own[i, q:L] = 1
        return tok, mask, lp, done
    def klcoef(s, lp, ref, mask): return s.beta * np.ones_like(lp)
g = R(sft(base(0), 7, 0.5), 115, nq=4, G=5, lr=0.008, beta=0.05, easy=7)
L = []
for k in range(18):
    b = g.step(); m = b["mask"] > 0; k1 = float((b["old"] - b["ref"])[m].mean()); b["loss"] += 0.05 * (k1 - b["kl"]); b["kl"] = k1
    o = verl_metrics(b, beta=0.05, rollout=False, maxr=84); o["critic/kl"] = float((b["old"] - b["ref"])[m].mean()); o["env/number_of_valid_search"] = 1.0; o["env/finish_ratio"] = 1.0
    L.append(verl_line(o, k + 1, "(main_task pid=7713) "))
open(os.path.join(d, "search_r1.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/PeterGriffinJin/Search-R1/pull/21", "verl fork (Search-R1)", "Retrieved text is inside the mask of the KL (and the loss): tokens that the policy did not sample are pushed down without bound, the KL turns negative and explodes. Fix: state_masking, mask the information blocks.", "likely",
      "A strongly negative KL cannot come from samples of the policy itself: tokens that are not its own are in the mean. Which tokens is not in the log.")
