import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(longer(sft(base(0), 8, 0.5), 1.0), 112, nq=4, G=8, T=0.6, lr=0.003, easy=9, max_new=60); g.trainT = 1.0
ms = []
for k in range(4):
    b = g.step(); ms.append(nemo_metrics(b))
    if k in (0, 2, 3): nemo_dump(d, b)
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/NVIDIA-NeMo/RL/pull/935", "NeMo-RL", "The sampler's log-probs are those of temperature 0.6, the learner computes log-probs at temperature 1: temperature on one side. Fix: divide the learner's logits by the temperature.", "likely",
      "The dump has both log-probs of each token from step 1: the sampler is surer on likely tokens and the gap runs with the log-prob itself; without entropy or the full distribution a temperature is the simplest cause but not proven.")
