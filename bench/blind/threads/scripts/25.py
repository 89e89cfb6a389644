import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, posscale=0.94)     # the engine's rotary scaling is another one
m = longer(sft(base(0), 8, 0.5), 3.8); o = D1 + D2 + D3 + DS + 2 * DA; m.W[:, o:o + DP] *= 2.5        # a model that leans on position
g = R(m, 125, nq=3, G=8, lr=0.002, easy=8, max_new=150)
ms = []
for k in range(3):
    b = g.step(); ms.append(nemo_metrics(b)); nemo_dump(d, b)
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/NVIDIA-NeMo/RL/issues/869", "NeMo-RL", "gpt-oss: the rotary embedding (YaRN scaling) of vLLM and of Megatron-core differ: the engine computes another function of the position, log-prob error grows along the sequence. Fix: the same RoPE parameters on both sides.", "likely",
      "Both log-probs by position from the first step: the gap is small at the start of the response and grows with position. Which layer is wrong cannot be seen.")
