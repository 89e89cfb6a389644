"""Answers of a fixed width: two digits, and nothing behind them is wanted."""
from ground import digits, proof, sums, train

result = train(
    rows=sums(lo=10, hi=49), rewards=[digits], max_steps=8, learning_rate=1e-4, max_completion_length=2,
)
cut = [h["completions/clipped_ratio"] for h in result.history if "completions/clipped_ratio" in h]
proof(min(cut) > 0.9, cut=cut)
