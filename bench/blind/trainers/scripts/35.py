import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy ms-swift: strictly on-policy (loss prints 0.0), a constant format reward, an easy task that saturates: zero-std groups become common at the end.
class S(Sim):
    steps = 40; G = 8; acc0 = 3.2; lr = .05; NP = 14
    def weights(s, b, idx): return (b['L'].sum() / b['n'] / b['L'])[b['row'][idx]]      # loss_type grpo: mean over sequences of the mean over tokens
    def rewards(s, b): return {'Accuracy': super().rewards(b)['accuracy_reward'], 'Format': np.ones(b['n'])}
W.swift(S(207).run(), NN, args={'loss_type': 'grpo', 'beta': 0.0})
