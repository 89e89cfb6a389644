import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, lp_mode="raw")
g = R(longer(sft(base(0), 8, 0.5), 1.0), 116, nq=4, G=8, T=0.7, lr=0.002, easy=9, max_new=60)
L = []
for k in range(3):
    b = g.step(); slime_pt(d, b, 8); L += slime_lines(b, 0.0, f"2026-09-02 21:4{k}:07")
open(os.path.join(d, "train.log"), "w").write("\n".join(L) + "\n")
truth(N, "https://github.com/vllm-project/vime/issues/64", "slime fork (vime)", "vLLM returns raw_logprobs (before temperature) by default, the learner's are at rollout temperature 0.7: train_rollout_logprob_abs_diff is high from the start. Fix: logprobs_mode=processed_logprobs.", "likely",
      "train_data holds rollout_log_probs, log_probs and entropy at step 0: learner surer than sampler, gap runs with the log-prob as a temperature does; that the sampler is the raw side is an inference.")
