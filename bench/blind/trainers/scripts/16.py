import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# verl: math_verify's signal.alarm raises outside the main thread; the reward manager swallows it and gives 0 to every answer.
import signal, threading
class S(Sim):
    steps = 16; G = 8
    def rewards(s, b):
        good = super().rewards(b)['accuracy_reward']; sc = np.zeros(b['n'])
        def work():
            for i in range(b['n']):
                try: signal.signal(signal.SIGALRM, signal.SIG_DFL); sc[i] = good[i]
                except Exception: sc[i] = 0.0
        t = threading.Thread(target=work); t.start(); t.join(); return {'acc': sc}
W.verl(S(111).run(), NN, reward_extra=True)
