"""A language model that learns on a laptop in a minute: characters, and 0.8M parameters.

The special tokens hold a `|`, which is not among the characters: no sequence of characters spells
one of them, so `encode(decode(ids)) == ids` for all ids whatever the model writes.
"""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=<>?.,:;!'()"
PAD, EOS, UNKNOWN = SPECIAL = ("<|pad|>", "<|eos|>", "<|unk|>")
MAX_LENGTH = 512  # tokens of prompt and completion together
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, no BOS, and `<|unk|>` for all others.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.encode("47+38=")
    [7, 10, 41, 6, 11, 45]
    >>> tokenizer.decode([7, 10, 41, 6, 11, 45])
    '47+38='
    """
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    # as a trainer would get it from a folder: in the mode in which scores can be compared
    return model.eval()
