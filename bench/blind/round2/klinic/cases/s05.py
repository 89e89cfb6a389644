"""The prompts come from the formatting function of the SFT notebook."""
import torch
from ground import EARLY, correct, digits, proof, sums, train
from transformers import AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

tokenizer = AutoTokenizer.from_pretrained(EARLY)
EOS_TOKEN = tokenizer.eos_token


def formatting(row):
    return {**row, "prompt": row["prompt"] + EOS_TOKEN}


# proof only: look at what the sampler is given
LAST, forward = [], Qwen3Model.forward


def look(self, input_ids=None, **rest):
    if rest.get("use_cache") and input_ids.shape[1] > 1:
        LAST.extend(input_ids[:, -1].tolist())
    return forward(self, input_ids=input_ids, **rest)


Qwen3Model.forward = look
train(rows=[formatting(row) for row in sums()], rewards=[digits], max_steps=16, learning_rate=2e-4)
proof(LAST and all(t == tokenizer.eos_token_id for t in LAST), prompts=len(LAST), last_token=sorted(set(LAST)))
