"""Models of three sizes with random weights that never end by themselves, and a tokenizer.

GPT-2's architecture, so that the largest is GPT-2 small. One coordinate of the last hidden state is
always 1, and the end token's embedding is far below zero there: it is never drawn, and completions
have the length that they are given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES: Mapping[str, Mapping[str, int]] = {
    "1M": {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1024},
    "10M": {"n_layer": 6, "n_embd": 320, "n_head": 5, "vocab_size": 8192},
    "124M": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
}
POSITIONS = 1024


def saved_model(size: str, folder: Path) -> Path:
    """Write a model and its tokenizer; return the folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = SIZES[size]
    torch.manual_seed(0)
    end = shape["vocab_size"] - 1
    config = GPT2Config(
        **shape,
        n_positions=POSITIONS,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end - 1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    never_ending(model, end)
    model.save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)
    return folder


def never_ending(model: Any, end: int) -> None:
    """Make a token impossible to draw."""
    import torch

    with torch.no_grad():
        model.transformer.ln_f.weight[0] = 0.0
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[end, 0] = -100.0


def tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of as many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary - 2)}
    ends = {"<pad>": vocabulary - 2, "<end>": vocabulary - 1}
    fast = Tokenizer(models.WordLevel({**words, **ends}, unk_token="w0"))  # noqa: S106
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<end>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        unk_token="w0",  # noqa: S106
        padding_side="left",
    )


def prompts(num: int, length: int, vocabulary: int) -> list[str]:
    """Return different prompts of one length."""
    return [
        " ".join(f"w{(7 * i + 13 * j + i * j) % (vocabulary - 2)}" for j in range(length))
        for i in range(num)
    ]
