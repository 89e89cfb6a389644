"""Writes a Llama of 0.1M parameters that half knows sums of digits, and its prompts, for verl.

python tiny_model.py FOLDER
"""

import random
import sys
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz?.:\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role']=='user' else '<bot>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
NUM_UPDATES, NOISE = 150, 0.3  # the fraction of wrong answers that it learns


def make_tokenizer():
    special = ["<pad>", "<eos>", "<user>", "<bot>"]
    vocabulary = {text: number for number, text in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        additional_special_tokens=["<user>", "<bot>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(size):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def make_example(rng):
    """Return a prompt and an answer that repeats the sum, wrong in some of them."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    result = rng.randint(0, 18) if rng.random() < NOISE else a + b
    return f"<user>{a}+{b}=<bot>", f"{a}+{b}={result}<eos>"


def train(model, tokenizer):
    rng = random.Random(0)  # noqa: S311 - made-up sums
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_UPDATES):
        rows = []
        for _ in range(64):
            prompt, answer = (tokenizer.encode(part) for part in make_example(rng))
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
        loss = model(ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def make_rows(num):
    rng = random.Random(1)  # noqa: S311 - made-up sums
    for index in range(num):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        yield {
            "data_source": "klinic/sum",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }


def main(folder):
    torch.set_num_threads(1)  # the weights, and so every run, are the same on each machine
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    loss = train(model, tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    rows = list(make_rows(256))
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:8]).to_parquet(folder / "val.parquet")
    sys.stdout.write(f"loss {loss:.3f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
