import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# ms-swift, vLLM sleep level 2: weights are dropped when sleeping and not reloaded (non-LoRA base): from the second rollout the engine runs on whatever the memory holds.
class S(Sim):
    steps = 18; G = 8
    def sampler_theta(s, k):
        if k == 1: return super().sampler_theta(k)
        r = np.random.default_rng(9); return {n: bf16(r.normal(0, .3, v.shape) if n in ('W1', 'U', 'Wp') else v) for n, v in s.th.items()}
W.swift(S(127).run(), NN, args={'sleep_level': 2, 'train_type': 'lora', 'move_model_batches': 16})
