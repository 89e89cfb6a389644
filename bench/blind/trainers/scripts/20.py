import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# verl: KL both in the reward and as a loss.
class S(Sim):
    steps = 30; G = 8; beta = 0.3
    def rescale(s, R, b):
        kl = np.array([(b['old'] - b['ref'])[b['row'] == i].sum() for i in range(b['n'])]); b['klr'] = kl; b['R_kl'] = R - .15 * kl; return b['R_kl']
s = S(107).run()
W.verl(s, NN, cfg={'algorithm': {'use_kl_in_reward': True, 'kl_penalty': 'kl', 'kl_ctrl': {'type': 'fixed', 'kl_coef': .15}}}, extra=lambda s, b: {'actor/reward_kl_penalty': float((b['klr'] / b['L']).mean()), 'actor/reward_kl_penalty_coeff': .15})
