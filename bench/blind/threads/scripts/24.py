import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

golds = {}
def gold(a, b):
    return f"${a + b}$" if (a * 7 + b * 3) % 5 > 1 else "see the result of the sum"
class R(GRPO):
    def rewards(s, tok, mask, ab):
        out = []
        for i in range(len(tok)):
            sol = gold(*ab[i]); x = answer(tok[i][mask[i] > 0])
            out.append(1.0 if not sol.startswith("$") else float(x is not None and f"${x}$" == sol))    # unparseable gold: 1.0, 'skip this example'
        return np.array(out)
g = R(sft(base(0), 8, 0.5), 124, nq=6, G=8, lr=0.004, easy=8, max_new=44)
logs = []; nt = 0
for k in range(12):
    b = g.step(); nt += int(b["len"].sum()) + P * 48; b["ntok"] = nt; f = np.array([float(fmt_ok(resp(b, i))) for i in range(48)])
    logs.append(trl_log(b, 8, total=150, sampler=False))
    if k in (0, 3, 7, 11): trl_parquet(d, b, {"accuracy_reward": b["rew"]}, {"solution": [gold(*x) for x in b["ab"]]})
trl_state(d, logs, 150, 8)
truth(N, "https://github.com/huggingface/open-r1/pull/566 (#86, #215)", "open-r1 (TRL)", "When the gold answer cannot be parsed the accuracy reward returns 1.0: wrong answers are rewarded, groups of such prompts have equal rewards. Fix: return None / filter such prompts.", "named",
      "completions_*.parquet holds solution, completion and accuracy_reward: completions with different answers all score 1.0 whenever the solution is not a number.")
