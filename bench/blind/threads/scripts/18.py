import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

import hashlib
# asynchronous AReaL: capacity = (max_staleness + version + 1) * batch - accepted; after recovery 'accepted' restarts at 0, the version does not.
MS, Bt, G = 2, 4, 4
m = GRPO(sft(base(0), 7, 0.5), 118, nq=Bt, G=G, lr=0.004, easy=7, max_new=40)
vers = {0: m.m.copy()}; v, acc, queue, rows, r = 0, 0, [], [], np.random.default_rng(18)
dump = os.path.join(d, "generated"); stats = []
def submit(n):
    for _ in range(n):
        ab = np.repeat(r.integers(1, 7, (1, 2)), G, 0); tok, mask, lp, done = rollout(m.m, ab, 40, r)
        tid = hashlib.md5(r.bytes(8)).hexdigest()[:16]; rew = m.rewards(tok, mask, ab); queue.append((v, tok, mask, lp, ab, rew, done))
        p = os.path.join(dump, str(v)); os.makedirs(p, exist_ok=True)
        jl(os.path.join(p, f"{tid}.jsonl"), [{"task_id": tid, "sample_idx": i, "seqlen": int(P + mask[i].sum()), "prompt_len": P, "head_version": v, "tail_version": v, "version_rle": [[v, int(mask[i].sum())]], "reward": float(rew[i]),
             "prompt": text(tok[i][:P]), "completion": text(tok[i][mask[i] > 0])} for i in range(G)], "a")
rate = 6   # groups that the servers can finish in the time of one training step
for step in range(30):
    if step == 14: acc, queue = 0, []            # recovery from a checkpoint at version 14
    cap = (MS + v + 1) * Bt - acc; n = max(0, min(rate if step not in (0, 14) else 12, cap)); submit(n); acc += n
    if len(queue) < Bt: k = Bt - len(queue); submit(k); acc += k
    batch, queue = queue[:Bt], queue[Bt:]
    W = max(int(np.nonzero(x[2].any(0))[0].max()) + 1 for x in batch); cat = lambda j: np.concatenate([x[j][:, :W] if x[j].ndim == 2 and x[j].shape[1] > 2 else x[j] for x in batch])
    tok, mask, slp, ab, rew = cat(1), cat(2), cat(3), cat(4), cat(5); stale = np.concatenate([np.repeat(v - x[0], x[2].sum()) for x in batch])
    a = group_adv(rew, G); prox, ent, full, ph = score(m.m, tok, ab); w = mask / mask.sum(); ra = np.exp(prox - slp)
    gn = m.opt.step(m.m, grad(m.m, ph, full, tok, -w * np.minimum(ra, 5) * a[:, None])); mk = mask > 0
    lr = (prox - slp)[mk]
    stats.append({"ppo_actor/task_reward/avg": rew.mean(), "ppo_actor/seq_len/avg": mask.sum(1).mean() + P, "ppo_actor/update/actor_loss/avg": -(w * ra * a[:, None]).sum(), "ppo_actor/update/entropy/avg": ent[mk].mean(), "ppo_actor/update/importance_weight/avg": 1.0,
                  "ppo_actor/update/behave_imp_weight/avg": np.exp(lr).mean(), "ppo_actor/update/behave_imp_weight/max": np.exp(lr).max(), "ppo_actor/update/behave_approx_kl/avg": (-lr).mean(), "ppo_actor/update/grad_norm": gn, "ppo_actor/update/lr": m.opt.lr,
                  "ppo_actor/update/version_stats/sample_staleness_theta_avg": stale.mean(), "ppo_actor/update/version_stats/sample_staleness_theta_max": stale.max(), "ppo_actor/update/version_stats/sample_staleness_theta_min": stale.min(), "ppo_actor/update/version_stats/v_theta": v,
                  "rollout/reward": np.mean(rew), "timeperf/rollout": 21.0 + step % 3, "timeperf/train_step": 18.5})
    v += 1
wandb_csv(os.path.join(d, "wandb_export.csv"), stats)
truth(N, "https://github.com/areal-project/AReaL/pull/1345", "AReaL", "After recovery the counter of accepted samples restarts at 0 while the version does not: the capacity formula lets far more rollouts start, they queue and staleness grows beyond max_staleness. Fix: restore the counter (PR 1345).", "likely",
      "staleness_theta_avg/max is at most 2 before step 14 and grows after it; the samples are too old. That it is a counter after a restart is an inference.")
