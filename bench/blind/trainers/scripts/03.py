import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# open-instruct: the KL loss uses k1 (kl_estimator 0) as a loss: its gradient does not pull to the reference; larger beta, larger KL.
class S(Sim):
    steps = 40; G = 8; n_prompts = 6; beta = 1.0; kl_est = 'k1'; lr = .03; n_mini = 2; epochs = 2
W.openinstruct(S(128).run(), NN)
