import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy verl, DAPO: clip 0.2/0.28, four mini-batches a step, short response limit with overlong shaping declared.
class S(Sim):
    steps = 30; G = 8; n_prompts = 8; n_mini = 4; clip_hi = .28; max_len = 10; lr = .02
    def rewards(s, b):
        a = super().rewards(b)['accuracy_reward']; o = np.array([-.5 * max(0, (l - 7)) / 3 for l in b['L']]); b['acc'] = a; return {'acc_reward': a, 'overlong_reward': o}
W.verl(S(202).run(), NN, name='dapo', reward_extra=True, cfg={'algorithm': {'filter_groups': {'enable': False}}, 'reward_model': {'reward_manager': 'dapo', 'overlong_buffer': {'enable': True, 'len': 3, 'penalty_factor': .5, 'log': True}}})
