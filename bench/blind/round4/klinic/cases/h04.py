from ground import *

result = train(
    rows=sums(lo=10, hi=75), rewards=[correct], model=FULL, max_steps=12, max_completion_length=3, temperature=0.8, learning_rate=3e-5, kl_coef=0.05,
    **{"learner.mask_truncated": True, "reference.ema": 0.8, "sampling.top_k": 20, "kl.estimator": "exact"},
)
cut = [h["completions/clipped_ratio"] for h in result.history if "completions/clipped_ratio" in h]
proof(0.05 < sum(cut) / len(cut) < 0.9, clipped=cut)
