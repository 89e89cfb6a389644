"""Character-level language models of less than a million weights that train on a laptop in minutes.

    tiny        Qwen3, lower case and symbols: sums, and small questions
    tiny-small  the same with an eighth of the weights: a student of `tiny`
    tiny-gpt2   GPT-2, all of printable ASCII: chess positions and moves

The special tokens contain `|`, which is not in the character set: no sequence of characters spells
a special token, so `encode(decode(ids)) == ids` for any sampled ids.
"""

import string
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=<>?.,:;!'()"
PRINTABLE = string.digits + string.ascii_letters + " \n" + string.punctuation.replace("|", "")
PAD, EOS, UNKNOWN = SPECIAL = ("<|pad|>", "<|eos|>", "<|unk|>")
Model = TypeVar("Model", bound=torch.nn.Module)

MAX_LENGTH = 512  # tokens of prompt and completion together
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Return a character-level tokenizer without BOS; unknown characters become `<|unk|>`.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.encode("47+38=")
    [7, 10, 41, 6, 11, 45]
    >>> tokenizer.decode([7, 10, 41, 6, 11, 45])
    '47+38='
    """
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it tokens are joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",  # completions directly follow prompts
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, small: bool = False
) -> Qwen3ForCausalLM:
    """Return a new Qwen3 of 0.8M parameters, or of 0.1M, in float32, deterministic in the seed.

    An initializer range of 0.06 and a RoPE theta of 20 suit a narrow model and short texts: sums
    are learnt from fewer examples than with the usual 0.02 and 10,000. torch's global RNG state is
    left unchanged.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64 if small else 128,
        num_hidden_layers=2 if small else 4,
        num_attention_heads=2 if small else 4,
        num_key_value_heads=1 if small else 2,
        head_dim=32,
        intermediate_size=192 if small else 384,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 20.0},
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return _build_seeded(lambda: Qwen3ForCausalLM(config), seed)


def tiny_gpt2(tokenizer: PreTrainedTokenizerFast, seed: int) -> GPT2LMHeadModel:
    """Return a new GPT-2 of 0.9M parameters in float32, deterministic in the seed."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=MAX_LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # no pad_token_id: transformers would warn about padding that no token attends to
        dtype=torch.float32,
    )
    return _build_seeded(lambda: GPT2LMHeadModel(config), seed)


def build_built_in_model(name: str, *, seed: int) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return a new built-in model with its tokenizer."""
    tokenizer = built_in_tokenizer(name)
    if name == "tiny-gpt2":
        return tiny_gpt2(tokenizer, seed=seed), tokenizer
    return tiny_model(tokenizer, seed=seed, small=name == "tiny-small"), tokenizer


def built_in_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a built-in model."""
    return tiny_tokenizer(PRINTABLE if name == "tiny-gpt2" else CHARACTERS)


def _build_seeded(build: Callable[[], Model], seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().to(torch.float32)
    # in eval mode, as `from_pretrained` returns it, so that scores are comparable
    return model.eval()
