import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

m = sft(base(0), 7, 0.5); A = GRPO(m, 137, nq=6, G=8, lr=0.006, beta=0.02, easy=7, max_new=40)
r1 = [nemo_metrics(A.step(), 0.02) for _ in range(20)]
C = GRPO(A.m.copy(), 138, nq=6, G=8, lr=0.006, beta=0.02, easy=7, max_new=40)     # resume: the reference is made from the resumed policy
r2 = [nemo_metrics(C.step(), 0.02) for _ in range(16)]
tensorboard(os.path.join(d, "logs", "exp_001", "tensorboard"), r1, start=1); tensorboard(os.path.join(d, "logs", "exp_002", "tensorboard"), r2, start=21)
truth(N, "https://github.com/NVIDIA-NeMo/RL/pull/3722", "NeMo-RL", "At resume the reference policy is loaded from the resumed checkpoint instead of the initial model: kl_penalty falls to 0 and the anchor has moved. Fix: PR 3722.", "likely",
      "kl_penalty rises over 20 steps, drops to about 0 at the first step of the second run while reward and entropy go on: the reference has moved.")
