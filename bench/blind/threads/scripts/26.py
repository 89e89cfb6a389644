import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

g = GRPO(longer(sft(base(0), 8, 0.5), 1.0), 126, nq=4, G=8, T=0.7, lr=0.003, easy=8, max_new=64)
ms = []
for k in range(6):
    b = g.step(); ms.append(nemo_metrics(b))
    if k in (0, 2, 5): nemo_dump(d, b)
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "look-alike of https://github.com/NVIDIA-NeMo/RL/pull/935", "NeMo-RL", "Healthy: temperature 0.7 on both sides, gap at numerical noise, some groups with equal rewards.", "healthy", "generation and prev log-probs agree at all positions and log-prob levels; advantages follow the group rewards.")
