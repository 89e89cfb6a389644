import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    def adv(s, r): return group_adv(r, 1, std=False)
g = R(sft(base(0), 7, 0.5), 108, nq=32, G=1, lr=0.005, easy=7, max_new=40)
ms = []
for k in range(18):
    b = g.step(); ms.append(orlhf_status(b))
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/OpenRLHF/OpenRLHF/pull/1250", "OpenRLHF", "dr_grpo with n_samples_per_prompt=1: the group mean is the reward itself, all advantages are 0, nothing is learnt. Fix: n_samples_per_prompt > 1 (or another baseline); PR 1250 refuses it.", "likely",
      "policy_loss, return and grad norm are exactly 0 while reward varies between steps. That the group has one member is shown only by group_reward_std 0; equal rewards in all groups would look alike, but not over all steps with a mean reward near 0.4.")
