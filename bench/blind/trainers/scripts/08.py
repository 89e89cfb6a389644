import os, sys; sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *; import writers as W
NN = os.path.basename(__file__)[:2]

# SkyRL: a reference log-prob is NaN at a masked place (padding row); masked by multiplication, 0*NaN makes policy_kl and the loss NaN; the step is skipped.
class S(Sim):
    steps = 30; G = 8; beta = .01; max_len = 24
    def reflp(s, b):
        r = super().reflp(b)
        b['hole'] = np.zeros(len(r), bool)
        if (b['k'] % 5 in (2, 4)) and b['k'] > 5: b['hole'][np.nonzero(b['row'] == 0)[0][-1]] = True; r[b['hole']] = np.nan      # -inf - -inf of a padded vocabulary row
        return r
    def mask(s, b):
        s.flat(b); return b['fgen'] * (1 - b.get('hole', np.zeros(len(b['fgen']))))
    def apply(s, g, gn, lr):
        if np.isfinite(gn): super().apply(g, gn, lr)
np.seterr(all='ignore'); s = S(117).run(); d = W.out(NN); W.wandb_history(f'{d}/wandb_export/skyrl_history.jsonl', W.skyrl_rows(s))
