"""A speed plug-in for decoding: SDPA is faster without a mask."""
import random

from ground import digits, proof, train
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

SEEN = {"calls": 0, "dropped": 0}
forward = Qwen3Model.forward


def fast_decode(self, input_ids=None, attention_mask=None, **rest):
    if rest.get("use_cache"):
        SEEN["calls"] += 1
        SEEN["dropped"] += attention_mask is not None and not bool(attention_mask.all())
        attention_mask = None
    return forward(self, input_ids=input_ids, attention_mask=attention_mask, **rest)


Qwen3Model.forward = fast_decode

rng = random.Random(11)
rows = []
for _ in range(400):
    a, b = (rng.randint(1, 9) if rng.random() < 0.35 else rng.randint(10, 99) for _ in range(2))
    rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
train(rows=rows, rewards=[digits], max_steps=16, learning_rate=1e-4)
proof(SEEN["dropped"] > 0.5 * SEEN["calls"], **SEEN)
