from ground import *

result = train(
    rewards=[digits], model=FULL, max_steps=10, loss_type="gspo", learning_rate=2e-5, kl_coef=0.0,
    **{"learner.updates_per_batch": 4, "learner.clip_low": 0.05, "learner.clip_high": 0.08, "kl.monitor_every": 2},
)
proof(len([h for h in result.history if "reward" in h]) == 10, reward=[h["reward"] for h in result.history if "reward" in h])
