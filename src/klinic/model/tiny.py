"""Language models that learn on a laptop in minutes: characters, and less than a million weights.

    tiny        Qwen3, lower case and signs: sums, and small questions
    tiny-gpt2   GPT-2, all of printable ASCII: positions and moves of chess

The special tokens hold a `|`, which is not among the characters: no sequence of characters spells
one of them, so `encode(decode(ids)) == ids` for all ids whatever the model writes.
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
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, no BOS, and `<|unk|>` for all others.

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
        chat_template=CHAT,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",  # completions begin where prompts end
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a fresh Qwen3 of 0.8M parameters in float32, the same for the same seed.

    First weights of 0.06 and rotations of theta 20 suit a narrow model and short texts: sums are
    learnt from fewer examples than with the usual 0.02 and 10,000. The global random stream of
    torch is left as it was.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
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
    return _seeded(lambda: Qwen3ForCausalLM(config), seed)


def tiny_gpt2(tokenizer: PreTrainedTokenizerFast, seed: int) -> GPT2LMHeadModel:
    """Return a fresh GPT-2 of 0.9M parameters in float32, the same for the same seed."""
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
        # no pad_token_id: transformers would warn of padding that no token ever sees
        dtype=torch.float32,
    )
    return _seeded(lambda: GPT2LMHeadModel(config), seed)


def built_in(name: str, *, seed: int) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return a fresh model of klinic's own with its tokenizer."""
    tokenizer = built_in_tokenizer(name)
    make = tiny_gpt2 if name == "tiny-gpt2" else tiny_model
    return make(tokenizer, seed=seed), tokenizer


def built_in_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model of klinic's own."""
    return tiny_tokenizer(PRINTABLE if name == "tiny-gpt2" else CHARACTERS)


def _seeded(make: Callable[[], Model], seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().to(torch.float32)
    # as a trainer would get it from a folder: in the mode in which scores can be compared
    return model.eval()
