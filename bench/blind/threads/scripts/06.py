import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

def pen(z, tok, r=1.1):
    z = z.copy(); seen = np.zeros(z.shape, bool); np.put_along_axis(seen, tok, True, 1)
    return np.where(seen, np.where(z > 0, z / r, z * r), z)
class R(GRPO):
    def generate(s, ab): return rollout(s.engine, ab, s.max_new, s.rng, T=s.T, transform=pen)
g = R(longer(sft(base(0), 8, 0.5), 2.5), 106, nq=4, G=8, lr=0.003, easy=8, max_new=80)
ms = []
for k in range(4):
    b = g.step(); ms.append(nemo_metrics(b))
    if k in (0, 1, 3): nemo_dump(d, b)
tensorboard(os.path.join(d, "tensorboard"), ms)
truth(N, "https://github.com/NVIDIA-NeMo/RL/issues/3497", "NeMo-RL", "vLLM takes parameters which are not set from the model's generation_config.json: repetition_penalty 1.1 is active in the sampler and unknown to the learner. Fix: generation_config='vllm' (PR 3685) or set repetition_penalty=1.0.", "likely",
      "Both log-probs and the token ids are there from step 1, before any update: the gap depends on whether the token was already in the context. A sampling transform on one side can be seen; that it is a repetition penalty needs that split.")
