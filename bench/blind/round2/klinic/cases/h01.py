"""A model that solves most of its prompts already, with a lower temperature."""
from ground import FULL, correct, proof, sums, train

result = train(model=FULL, rows=sums(lo=10, hi=60), rewards=[correct], max_steps=10, learning_rate=2e-5, temperature=0.6)
reward = [h["reward"] for h in result.history if "reward" in h]
same = [h["frac_reward_zero_std"] for h in result.history if "frac_reward_zero_std" in h]
proof(sum(same) / len(same) > 0.4 and sum(reward) / len(reward) > 0.6, reward=reward, same=same)
