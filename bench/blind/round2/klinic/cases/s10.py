"""A KL to the SFT model, by its path."""
from ground import EARLY, FULL, digits, proof, sums, train

SFT = FULL
result = train(model=EARLY, rewards=[digits], max_steps=8, learning_rate=1e-4, kl_coef=0.1, reference=SFT)
kl = [h["kl"] for h in result.history if "kl" in h]
proof(kl[0] > 0.01, kl=kl)
