import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# Search-R1 (verl fork): critic/kl and the KL in the reward count the retrieved text, which the policy did not sample.
class S(Sim):
    steps = 40; G = 8; search = True; max_len = 110; beta = 0; NP = 24; lr = .03
    def inject(s, tok, row):
        return [INFO] + [int(x) for x in s.rng.integers(W0, V, 10)] + [EINFO] if tok == SEARCH else []
    def setup(s):
        for th in (s.th, s.ref): th['W1'][np.ix_(np.arange(W0, V), [SEARCH])] = 3.2; th['W1'][ASST, SEARCH] = 3.0; th['W1'][EINFO, SEARCH] = 1.2
    def rewards(s, b):
        r = super().rewards(b)['accuracy_reward']; return {'em': r * np.array([float(SEARCH in x) for x in b['ids']])}
    def rescale(s, R, b):
        d = b['old'] - b['ref']; b['klm'] = float(d.mean()); b['klr'] = np.array([d[b['row'] == i].sum() for i in range(b['n'])]); b['R_kl'] = R - .05 * b['klr']; return b['R_kl']
s = S(112).run()
W.verl(s, NN, corr=False, name='nq-search-r1-grpo', cfg={'algorithm': {'use_kl_in_reward': True, 'kl_penalty': 'kl', 'kl_ctrl': {'type': 'fixed', 'kl_coef': .05}}, 'actor_rollout_ref': {'actor': {'state_masking': True}}},
       extra=lambda s, b: {'critic/kl': b['klm'], 'critic/kl_coeff': .05, 'env/number_of_valid_search': float(np.mean([x.count(SEARCH) for x in b['ids']])), 'env/finish_ratio': float(np.mean([f == 'stop' for f in b['finish']]))})
