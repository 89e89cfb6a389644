import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# healthy open-instruct: long outputs with a small response_length: about half end by length; two updates a batch.
class S(Sim):
    steps = 24; G = 8; n_prompts = 8; ans_bias = 2.6; max_len = 16; n_mini = 2; beta = .01; clip_hi = .272; lr = .02
W.openinstruct(S(208).run(), NN)
