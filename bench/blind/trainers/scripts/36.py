import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# slime: uneven groups (aborted samples): _post_process_rewards falls to rewards.view(-1, N): one mean and std over the whole batch.
class S(Sim):
    steps = 12; G = 8; n_prompts = 6; beta = .001
    def group_sizes(s, k): return [int(x) for x in s.rng.integers(4, 9, s.n_prompts - 1)] + [7]
    def advantages(s, R, b): r = R - R.mean(); return r / (r.std(ddof=1) + 1e-6)
W.slime(S(118).run(), NN)
