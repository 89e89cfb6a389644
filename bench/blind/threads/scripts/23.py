import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from sim import *
from out import *
N = os.path.basename(__file__)[:2]; d = case(N)

class R(GRPO):
    bad = False
    def generate(s, ab):
        tok, mask, lp, done = super().generate(ab); s.bad = s.rng.random() < 0.22     # a micro batch with an empty (padded) row
        return tok, mask, lp, done
    def klcoef(s, lp, ref, mask):
        x = np.where((mask == 0) & (np.arange(len(lp)) == 0)[:, None] & s.bad, -np.inf, lp); y = np.where(np.isinf(x), -np.inf, ref)
        k = x - y; s.nan = bool(np.isnan((k * mask).sum()))
        return super().klcoef(lp, ref, mask)
class Skip(Adam):
    def step(s, model, g, lr=None):
        if own.nan: return float("nan")
        return super().step(model, g, lr)
own = R.__new__(R); own.nan = False; own.__init__(sft(base(0), 7, 0.5), 123, nq=4, G=8, lr=0.005, beta=0.01, easy=7, max_new=40); own.opt = Skip(0.005)
rows = []; n = float("nan")
for k in range(17):
    b = own.step(); x = n if own.nan else 1.0; g = np.abs(gap(b)); rw = b["rew"].reshape(-1, 8)
    rows.append({"trainer/global_step": k + 1, "trainer/epoch": 0, "reward/avg_raw_reward": b["rew"].mean(), "reward/avg_pass_at_8": float((rw.max(1) > 0).mean()), "generate/avg_num_tokens": b["len"].mean(), "generate/min_num_tokens": int(b["len"].min()), "generate/max_num_tokens": int(b["len"].max()), "generate/std_num_tokens": b["len"].std(),
                 "loss/avg_final_rewards": b["rew"].mean(), "loss/avg_raw_advantages": b["adv"].mean(), "loss/avg_raw_advantages_abs": np.abs(b["adv"]).mean(), "policy/final_loss": x * b["loss"], "policy/policy_loss": (b["loss"] - .01 * b["kl"]), "policy/policy_entropy": b["entm"], "policy/policy_kl": x * b["kl"], "policy/policy_lr": 1e-6,
                 "policy/loss_metrics/clip_ratio": b["cf"], "policy/raw_grad_norm": b["gn"], "policy/rollout_train_logprobs_abs_diff_mean": g.mean(), "policy/rollout_train_logprobs_abs_diff_std": g.std(), "timing/step": 55.0 + k % 4})
wandb_csv(os.path.join(d, "wandb_history.csv"), rows)
truth(N, "https://github.com/NovaSky-AI/SkyRL/pull/1635", "SkyRL", "KL at masked places is -inf minus -inf = NaN, and 0 * NaN is NaN in the masked mean: policy_kl and the loss become NaN though every trained token is finite. Fix: torch.where before the sum (PR 1635).", "likely",
      "In single steps policy_kl, final_loss and the gradient norm are NaN while policy_loss, entropy and the log-prob difference of the same step are finite: the NaN comes with the KL term; that it sits outside the mask is an inference.")
