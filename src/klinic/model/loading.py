"""Load a causal LM as a policy: weights, tokenizer and adapter, and check its log-probs."""

import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from klinic.errors import ConfigError, first_line
from klinic.model.adapter_files import base_model_name, is_adapter
from klinic.model.adapters import (
    add_lora_adapter,
    load_adapter,
    merge_into_base,
)
from klinic.model.attention import refuse_missing_kernel, select_attention
from klinic.model.device import move_model, resolve_device
from klinic.model.dropout import disable_dropout, refuse_nondeterminism
from klinic.model.equivalence import MAX_LOGP_DIFFERENCE, largest_difference, probe_logp
from klinic.model.frozen_base import store_base_in_bf16
from klinic.model.head import check_head_logits
from klinic.model.layout import pad_rows
from klinic.model.scorer import TokenScorer
from klinic.model.zero_shards import full_numel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from klinic.recipe.sections import ModelSection

BUILT_IN_MODELS = ("tiny", "tiny-small", "tiny-gpt2")
"""Models that klinic builds itself."""
TOKENIZER_FILE = "tokenizer_config.json"
PADDING_WARNING = "warn_if_padding_and_no_attention_mask"
NUM_CHECK_TOKENS = 16  # tokens on which a loaded model is checked
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError),
    ImportError,  # from code shipped with a model
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model with its tokenizer, ready for scoring, sampling and training."""

    scorer: TokenScorer
    tokenizer: Any
    name: str
    eos_ids: tuple[int, ...]
    pad_id: int
    vocabulary_size: int
    """Number of outputs of the model's head; a tokenizer may have fewer tokens."""
    trust_remote_code: bool
    """Whether code shipped with the model may run."""
    context_window: int | None
    """Maximum tokens of prompt and completion together; None where the config has no limit."""
    attention: str = "auto"
    """The recipe's `model.attention`."""
    has_tensors_of_files: bool = False
    """Whether a saved model has the same tensors: transformers converts none of them."""

    @property
    def lm(self) -> Any:
        """The transformers (or PEFT) model."""
        return self.scorer.lm


def load_policy(
    section: "ModelSection", *, temperature: float, seed: int, tokenizer: Any = None
) -> Policy:
    """Return the policy described by a recipe's `model` section.

    An existing adapter is trained further; with `lora_rank` set, it is merged into its base first.
    `tokenizer` replaces that of the model's folder.
    """
    refuse_missing_kernel(section.attention, resolve_device(section.device), section.dtype)
    lm, own_tokenizer = _load_model(
        section.name, seed=seed, trust_remote_code=section.trust_remote_code
    )
    if section.lora_rank is not None and is_adapter(section.name):
        lm = _merge_checked(lm, section.name)
    tokenizer = own_tokenizer if tokenizer is None else tokenizer
    return prepare_policy(lm, tokenizer, section, temperature=temperature, seed=seed)


def load_merged_policy(section: "ModelSection", *, temperature: float, seed: int) -> Policy:
    """Return the policy without an adapter: an existing one is merged in, and none is added."""
    refuse_missing_kernel(section.attention, resolve_device(section.device), section.dtype)
    lm, tokenizer = _load_model(
        section.name, seed=seed, trust_remote_code=section.trust_remote_code
    )
    if is_adapter(section.name):
        lm = _merge_checked(lm, section.name)
    merged_section = section.model_copy(
        update={"lora_rank": None, "lora_alpha": None, "lora_target_modules": None}
    )
    return prepare_policy(lm, tokenizer, merged_section, temperature=temperature, seed=seed)


def prepare_policy(
    lm: Any, tokenizer: Any, section: "ModelSection", *, temperature: float, seed: int
) -> Policy:
    """Return a loaded model as a policy: adapter added, dropout off, log-probs checked."""
    lm = add_section_adapter(lm, section, seed=seed)
    if section.dtype == "bf16":
        store_base_in_bf16(lm)
    # after the adapter, whose start is then the same on any device
    move_model(lm, resolve_device(section.device))
    scorer = make_scorer(lm, section, temperature=temperature)
    check_log_probs(scorer, section.name)
    if section.compile:
        lm.get_decoder().compile(dynamic=True)
    return make_policy(scorer, tokenizer, section)


def add_section_adapter(lm: Any, section: "ModelSection", *, seed: int) -> Any:
    """Return the model with the new adapter of a recipe's `model` section, if it has one."""
    if section.lora_rank is None:
        return lm
    return add_lora_adapter(
        lm,
        rank=section.lora_rank,
        alpha=section.lora_alpha,
        target_modules=section.lora_target_modules,
        seed=seed,
    )


def make_scorer(lm: Any, section: "ModelSection", *, temperature: float) -> TokenScorer:
    """Return a model set up for training: attention kernel, checkpointing, dropout off."""
    select_attention(lm, section.attention, section.name)
    if section.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    disable_dropout(lm)
    lm.train()
    autocast = torch.bfloat16 if section.dtype == "bf16" else None
    return TokenScorer(
        lm, temperature=temperature, autocast=autocast, bf16_head=uses_bf16_head(lm, autocast)
    )


def make_policy(scorer: TokenScorer, tokenizer: Any, section: "ModelSection") -> Policy:
    """Return a model with its tokenizer as a policy."""
    lm = scorer.lm
    eos_ids = stop_ids(lm, tokenizer, section.name)
    vocabulary = int(lm.get_output_embeddings().weight.shape[0])
    return Policy(
        scorer=scorer,
        tokenizer=tokenizer,
        name=section.name,
        eos_ids=eos_ids,
        pad_id=_pad_id(tokenizer, eos_ids, vocabulary),
        vocabulary_size=vocabulary,
        trust_remote_code=section.trust_remote_code,
        context_window=getattr(lm.config.get_text_config(), "max_position_embeddings", None),
        attention=section.attention,
    )


def uses_bf16_head(lm: Any, autocast: torch.dtype | None) -> bool:
    """Whether the head multiplies bf16 operands: on an accelerator, if the head is trained.

    Ranks shard their model on the CPU or without values. A frozen head keeps one fp32 product,
    without a rounded copy of its weight.
    """
    device_type = lm.get_output_embeddings().weight.device.type
    return device_type not in ("cpu", "meta") and has_bf16_head(lm, autocast)


def has_bf16_head(lm: Any, autocast: torch.dtype | None) -> bool:
    """Whether an accelerator would multiply bf16 operands by the head."""
    return autocast is not None and bool(lm.get_output_embeddings().weight.requires_grad)


def load_scorer(
    name: str, *, like: Policy, seed: int, key: str = "reference.path", may_pad: bool = False
) -> TokenScorer:
    """Return another model as a scorer with the temperature and precision of a policy.

    `key` is the recipe key that names it. With `may_pad`, outputs beyond the policy's, for which
    the tokenizer has no token, are removed: models of one family often differ in that padding.
    """
    lm, tokenizer = _load_model(name, seed=seed, trust_remote_code=like.trust_remote_code, key=key)
    refuse_other_tokenizer(tokenizer, like, where=f"{key} is {name}")
    if may_pad and _num_outputs(lm) > like.vocabulary_size:
        lm.resize_token_embeddings(like.vocabulary_size)
    refuse_other_vocabulary(lm, like, where=f"{key} is {name}")
    disable_dropout(lm)
    move_model(lm, like.scorer.device)
    select_attention(lm, like.attention, name)
    scorer = TokenScorer(
        lm,
        temperature=like.scorer.temperature,
        autocast=like.scorer.autocast,
        bf16_head=like.scorer.head.in_bf16,
    )
    check_log_probs(scorer, name)
    return scorer


def refuse_other_vocabulary(lm: Any, like: Policy, *, where: str) -> None:
    """Refuse a model with another number of outputs."""
    if (size := _num_outputs(lm)) != like.vocabulary_size:
        raise ConfigError(
            f"{where}: it has {size} outputs and {like.name} has {like.vocabulary_size}, "
            "so a KL between them would be infinite or compare different tokens. Use a model of "
            "the same family and size of vocabulary."
        )


def _num_outputs(lm: Any) -> int:
    return int(lm.get_output_embeddings().weight.shape[0])


def refuse_other_tokenizer(tokenizer: Any, like: Policy, *, where: str) -> None:
    """Refuse a model whose token ids mean different tokens."""
    own, expected = tokenizer.get_vocab(), like.tokenizer.get_vocab()
    if own == expected:
        return
    differing = sorted(
        (token for token in own.keys() | expected.keys() if own.get(token) != expected.get(token)),
        key=lambda token: (expected.get(token, len(expected)), token),
    )
    first = differing[0]
    raise ConfigError(
        f"{where}: its tokenizer differs from that of {like.name} in {len(differing)} tokens; "
        f"{first!r} is id {own.get(first, 'none')} there and {expected.get(first, 'none')} here. "
        "A KL between the models would compare different tokens. Use a model with the same "
        "tokenizer."
    )


def _pad_id(tokenizer: Any, eos_ids: tuple[int, ...], vocabulary: int) -> int:
    """Return a padding id; no token attends to it, but the embedding must contain it."""
    pad_token_id = tokenizer.pad_token_id
    return eos_ids[0] if pad_token_id is None or pad_token_id >= vocabulary else int(pad_token_id)


def _load_model(
    name: str, *, seed: int, trust_remote_code: bool, key: str = "model.name"
) -> tuple[Any, Any]:
    if name in BUILT_IN_MODELS:
        from klinic.model.tiny import build_built_in_model

        return build_built_in_model(name, seed=seed)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _refuse_missing_folder(name, key)
    try:
        if is_adapter(name):
            lm, tokenizer = _load_model(
                base_model_name(Path(name)), seed=seed, trust_remote_code=trust_remote_code
            )
            if (Path(name) / TOKENIZER_FILE).is_file():  # it may have another chat template
                tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            return load_adapter(lm, Path(name)), tokenizer
        with hide_progress_bars():
            # fp32 whatever the file's dtype: these are the optimizer's master weights
            lm, info = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
            _refuse_missing_weights(sorted(info["missing_keys"]), name, key)
            disable_padding_warning(lm)
            return lm, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"{key} is {name}: it cannot be loaded ({first_line(error)}). Use a folder that "
            "`save_pretrained` wrote, a hub id that this machine can reach, or `tiny`."
        ) from error


def load_tokenizer(name: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a saved model, or of the base of an adapter that has none."""
    from transformers import AutoTokenizer

    has_own = not is_adapter(name) or (Path(name) / TOKENIZER_FILE).is_file()
    folder = name if has_own else base_model_name(Path(name))
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _refuse_missing_weights(missing: Sequence[str], name: str, key: str) -> None:
    if missing:
        raise ConfigError(
            f"{key} is {name}: its files lack {len(missing)} tensors, such as {missing[0]}: "
            "they would be initialised randomly. Download or save it again."
        )


def _merge_checked(lm: Any, name: str) -> Any:
    """Return the model with its adapter merged in; refuse if log-probs change."""
    before = probe_logp(TokenScorer(lm, temperature=1.0))
    merged = merge_into_base(lm)
    difference = largest_difference(before, probe_logp(TokenScorer(merged, temperature=1.0)))
    if not difference <= MAX_LOGP_DIFFERENCE:
        raise ConfigError(
            f"model.name is {name}: merging this adapter into its base changes log-probs by up to "
            f"{difference:.1e} (limit {MAX_LOGP_DIFFERENCE:.0e}), for "
            "example because it adapts an embedding that is "
            "tied to the head. Train it further instead: leave model.lora_rank out."
        )
    return merged


def _refuse_missing_folder(name: str, key: str) -> None:
    """Refuse a local path that does not exist, before querying the hub."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise ConfigError(
            f"{key} is {name}: there is no such folder. Use a folder that `save_pretrained` "
            "wrote, a hub id, or `tiny`."
        )


@contextmanager
def hide_progress_bars() -> "Iterator[None]":
    """Disable the progress bars of transformers, which would disturb klinic's own."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def disable_padding_warning(lm: Any) -> None:
    """Disable a model's warning about padding without a mask: no token attends to the padding.

    Older transformers models search for padding in every forward pass.
    """
    decoder = lm.get_decoder()
    if hasattr(decoder, PADDING_WARNING):
        setattr(decoder, PADDING_WARNING, _skip_warning)


def _skip_warning(*_: Any) -> None:
    pass


def stop_ids(lm: Any, tokenizer: Any, name: str) -> tuple[int, ...]:
    """Return every id that ends a completion: of tokenizer, config and generation config."""
    of_config = getattr(lm.config.get_text_config(), "eos_token_id", None)
    ids = _distinct_ids(*declared_stop_ids(lm, tokenizer), of_config)
    if not ids:
        raise ConfigError(
            f"model.name is {name}: neither its tokenizer nor its config names an end-of-sequence "
            "token, so every completion would reach the length limit. Set eos_token_id."
        )
    return ids


def declared_stop_ids(lm: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a completion according to tokenizer and generation config."""
    return _distinct_ids(
        tokenizer.eos_token_id, getattr(lm.generation_config, "eos_token_id", None)
    )


def _distinct_ids(*values: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the distinct ids of several values, each an id, a sequence of ids or None.

    >>> _distinct_ids(2, None, [5, 2])
    (2, 5)
    """
    sequences = [
        value if isinstance(value, Sequence) else [value] for value in values if value is not None
    ]
    return tuple(dict.fromkeys(int(number) for ids in sequences for number in ids))


@torch.no_grad()
def check_log_probs(scorer: TokenScorer, name: str) -> None:
    """Refuse a model whose forward pass is random, or whose logits differ from its head's."""
    vocabulary = scorer.lm.get_output_embeddings().weight.shape[0]
    ids = np.arange(NUM_CHECK_TOKENS) % vocabulary
    layout = pad_rows([ids[:4]], [ids[4:]], pad_id=0, device=scorer.device)
    first, second = scorer.hidden(layout), scorer.hidden(layout)
    refuse_nondeterminism(first, second, name)
    head_logits, model_logits = scorer.logits_of_head_and_model(layout)
    check_head_logits(head_logits, model_logits, name)


def num_parameters(lm: nn.Module) -> dict[str, int]:
    """Return the number of parameters of a model, and of its trainable ones."""
    return {
        "num_parameters": sum(full_numel(p) for p in lm.parameters()),
        "num_trainable": sum(full_numel(p) for p in lm.parameters() if p.requires_grad),
    }


def num_experts(lm: Any) -> int:
    """Return the number of experts per layer; 0 for a dense model."""
    config = lm.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(int(getattr(config, name, None) or 0) for name in names)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else forks in user code warn
