"""A plug-in fuses gate and up for inference."""
import torch
from ground import digits, proof, sums, train
from torch.nn.functional import linear
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

forward = Qwen3MLP.forward
SEEN = {"stale": 0.0, "calls": 0}


def fused(self, x):
    if self.training:
        return forward(self, x)
    if not hasattr(self, "_gate_up"):
        self._gate_up = torch.cat([self.gate_proj.weight, self.up_proj.weight]).detach().clone()
    gate, up = linear(x, self._gate_up).chunk(2, dim=-1)
    now = torch.cat([self.gate_proj.weight, self.up_proj.weight]).detach()
    SEEN["stale"] = max(SEEN["stale"], float((now - self._gate_up).abs().max()))
    SEEN["calls"] += 1
    return self.down_proj(self.act_fn(gate) * up)


Qwen3MLP.forward = fused
train(rewards=[digits], max_steps=14, learning_rate=5e-4)
proof(SEEN["calls"] > 50 and SEEN["stale"] > 1e-3, **SEEN)
