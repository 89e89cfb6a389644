import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def cur(s, tok, ab):
        lp, ent, full, ph = score(s.m, tok, ab, prec="bf16logits"); f = bf16(full); return bf16(lp), ent, f, ph
    def reflp(s, tok, ab): return bf16(score(s.ref, tok, ab, prec="bf16logits")[0])
g = R(sft(base(0), 7, 0.5), 129, nq=4, G=8, lr=0.003, beta=0.01, easy=7, max_new=40, minib=2)
L = []
for k in range(18):
    b = g.step(); b["gstd"] = float(group_std(b, 8).mean()); L.append(f"2024-11-20 0{k // 20}:{(k * 3) % 60:02d}:11.482 INFO openrlhf.trainer.ppo_trainer: ✨ Global step {k + 1}: {orlhf_status(b)}")
open(os.path.join(d, "openrlhf.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/OpenRLHF/OpenRLHF/pull/634", "OpenRLHF", "Since transformers 4.46 the logits stay in bf16: log-probs (and KL) are computed at three digits. Fix: cast logits to fp32 before log_softmax.", "no",
      "vllm_kl and kl are noisy but small; means hide the rounding of single tokens. A log of scalars cannot name the precision.")
