"""Settings that were collected from a serving config and an older trainer."""
from ground import digits, proof, sums, train

SAMPLES_OF_WARMUP = 600
result = train(
    rewards=[digits], max_steps=8, learning_rate=1e-4,
    temperature=0.1, warmup_steps=SAMPLES_OF_WARMUP, lr_scheduler_type="cosine",
)
same = [h["frac_reward_zero_std"] for h in result.history if "frac_reward_zero_std" in h]
rate = [h[k] for h in result.history for k in ("learning_rate", "lr") if k in h]
proof(sum(same) / len(same) > 0.3 and max(rate) < 1e-5, same=same, rate=rate)
