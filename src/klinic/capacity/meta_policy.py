"""Build a policy and its reference from configs alone: all shapes, no weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klinic.capacity.memory import ACTIVATIONS, COPIES, GRADIENTS, LOGITS, REFERENCE, WEIGHTS
from klinic.capacity.meta_tensors import META, MemoryMeter, MetaTensor, replace_by_meta_tensors
from klinic.errors import ConfigError
from klinic.model.adapter_files import base_model_name, is_adapter
from klinic.model.adapters import (
    START_ADAPTER,
    add_frozen_copy,
    add_lora_adapter,
    has_adapter,
)
from klinic.model.dropout import disable_dropout
from klinic.model.frozen_base import store_base_in_bf16
from klinic.model.loading import (
    BUILT_IN_MODELS,
    LOADING_ERRORS,
    Policy,
    has_bf16_head,
    num_parameters,
)
from klinic.model.moving_reference import MovingReference
from klinic.model.reference import Reference, ReferenceKind
from klinic.model.scorer import TokenScorer

if TYPE_CHECKING:
    from klinic.recipe.sections import ModelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaPolicy:
    """A policy and its reference without weights, and the meter that counts their memory."""

    meter: MemoryMeter
    policy: Policy
    reference: Reference | None
    num_parameters: int
    num_trainable: int


class MetaScorer(TokenScorer):
    """A scorer whose attention masks have no data: their size is quadratic in the length."""

    on_accelerator = False
    """Whether to take the memory that scoring takes on an accelerator."""

    def _rows_per_block(self, logp_all: Tensor) -> int:
        return len(logp_all) if self.on_accelerator else super()._rows_per_block(logp_all)

    def decode(self, **inputs: Any) -> Any:
        """Run the decoder without its head."""
        mask = inputs.get("attention_mask")
        if mask is not None:
            meter = next(self.lm.parameters()).meter
            inputs["attention_mask"] = MetaTensor(mask.to(META), meter)
        return super().decode(**inputs)


def build_meta_policy(
    section: "ModelSection",
    *,
    temperature: float,
    tied_to: str | bool,
    moves: bool = False,
    num_gpus: int = 0,
) -> MetaPolicy:
    """Return the recipe's policy with its reference: none, a copy of the policy or another model.

    A moving reference also keeps the initial policy. With `num_gpus` it runs the code of an
    accelerator, and tensors of the size of a shard are recognized.
    """
    lm = _build_model(section, tied_to_itself=tied_to is True, moves=moves)
    meter = MemoryMeter(tensor_classifier(lm, num_shards=max(1, num_gpus)))
    with meter.count_as(WEIGHTS):
        replace_by_meta_tensors(lm, meter)
    if section.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    disable_dropout(lm)
    lm.train()
    autocast = torch.bfloat16 if section.dtype == "bf16" else None
    scorer = MetaScorer(lm, temperature=temperature, autocast=autocast)
    scorer.on_accelerator = num_gpus > 0
    if num_gpus == 1 and has_bf16_head(lm, autocast):
        with meter.count_as(WEIGHTS):  # the head's bf16 copy; that of the reference is a copy of it
            scorer.head.round_weight(lm.get_output_embeddings().weight)
    policy = Policy(
        scorer=scorer,
        tokenizer=None,
        name=section.name,
        eos_ids=(),
        pad_id=0,
        vocabulary_size=int(lm.get_output_embeddings().weight.shape[0]),
        trust_remote_code=section.trust_remote_code,
        context_window=getattr(lm.config.get_text_config(), "max_position_embeddings", None),
    )
    reference = _build_reference(policy, meter, tied_to)
    if moves and reference is not None:
        reference = _add_start_reference(policy, meter, reference)
    return MetaPolicy(
        meter=meter,
        policy=policy,
        reference=reference,
        **num_parameters(lm),
    )


def _build_model(section: "ModelSection", *, tied_to_itself: bool, moves: bool) -> Any:
    """Return the model with the recipe's adapter and that adapter's frozen copies."""
    lm = build_architecture(section.name, remote=section.trust_remote_code)
    if section.lora_rank is not None:
        with META:
            lm = add_lora_adapter(
                lm,
                rank=section.lora_rank,
                alpha=section.lora_alpha,
                target_modules=section.lora_target_modules,
                seed=0,
            )
            _store_base(lm, section)
            if tied_to_itself and moves:
                add_frozen_copy(lm)
        return lm
    if not is_adapter(section.name):
        return lm
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(section.name)
    config.inference_mode = False
    with META:
        lm = get_peft_model(lm, config)
        _store_base(lm, section)
        if tied_to_itself:
            add_frozen_copy(lm)
            if moves:
                add_frozen_copy(lm, START_ADAPTER)
    return lm


def _store_base(lm: Any, section: "ModelSection") -> None:
    """Store the base in bf16 as loading does: weights that were published in bf16 are exact."""
    if section.dtype == "bf16":
        in_bf16 = _published_dtype(section) == torch.bfloat16
        store_base_in_bf16(lm, is_exact=lambda _: in_bf16)


def _published_dtype(section: "ModelSection") -> torch.dtype | None:
    """Return the dtype of a model's files according to its config."""
    if section.name in BUILT_IN_MODELS:
        return torch.float32
    dtype: torch.dtype | None = _read_config(section.name, remote=section.trust_remote_code).dtype
    return dtype


def _read_config(name: str, *, remote: bool) -> Any:
    """Return the config of a model, or of the model below an adapter."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(_base_name(name), trust_remote_code=remote)


def _base_name(name: str) -> str:
    return base_model_name(Path(name)) if is_adapter(name) else name


def is_config_reachable(name: str) -> bool:
    """Whether a model's config can be read here; always True for local paths, which fail later."""
    from transformers import AutoConfig

    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if name in BUILT_IN_MODELS or looks_local or Path(name).is_dir():
        return True
    try:
        AutoConfig.from_pretrained(name)
    except LOADING_ERRORS:
        return False
    return True


def build_architecture(name: str, *, remote: bool) -> Any:
    """Return a model built from its config, with arbitrary weights."""
    if name in BUILT_IN_MODELS:
        from klinic.model.tiny import build_built_in_model

        return build_built_in_model(name, seed=0)[0]
    from transformers import AutoModelForCausalLM

    try:
        config = _read_config(name, remote=remote)
        with META:
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=remote
            )
    except LOADING_ERRORS as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{_base_name(name)}: no model can be built from its config ({first}). Use a folder "
            "with a model's config.json, a hub id that this machine can reach, or `tiny`."
        ) from error


def _build_reference(policy: Policy, meter: MemoryMeter, tied_to: str | bool) -> Reference | None:
    if not tied_to:
        return None
    policy_scorer = policy.scorer
    if isinstance(tied_to, str):
        lm = build_architecture(tied_to, remote=policy.trust_remote_code)
        with meter.count_as(REFERENCE):
            replace_by_meta_tensors(lm, meter)
        reference_scorer = MetaScorer(
            lm, temperature=policy_scorer.temperature, autocast=policy_scorer.autocast
        )
        return _frozen_reference(reference_scorer, "copy")
    if has_adapter(policy.lm):
        continued = len(policy.lm.peft_config) > 1
        return _frozen_reference(policy_scorer, "adapter_frozen" if continued else "adapter_off")
    with meter.count_as(REFERENCE):
        return _frozen_reference(copy.deepcopy(policy_scorer), "copy")


def _add_start_reference(policy: Policy, meter: MemoryMeter, reference: Reference) -> Reference:
    """Return a moving reference that also keeps the initial policy."""
    start = reference  # with an adapter: disabled, or a frozen copy that the model already has
    if not has_adapter(policy.lm):
        with meter.count_as(REFERENCE):
            start = _frozen_reference(copy.deepcopy(policy.scorer), "copy")
    return MovingReference(
        scorer=reference.scorer,
        kind=reference.kind,
        source="",
        digest="",
        start_reference=start,
        policy_tensors={},
        reference_tensors={},
    )


def _frozen_reference(scorer: TokenScorer, kind: ReferenceKind) -> Reference:
    if kind == "copy":
        scorer.requires_grad_(False)
    return Reference(scorer=scorer, kind=kind, source="", digest="")


def tensor_classifier(lm: Any, num_shards: int = 1) -> Callable[[Tensor], str]:
    """Return a function that classifies tensors by shape and dtype."""
    vocabulary = int(lm.get_output_embeddings().weight.shape[0])
    weights = {p.shape for p in lm.parameters()} | {p.shape[::-1] for p in lm.parameters()}
    weights |= {torch.Size([-(-p.shape[0] // num_shards), *p.shape[1:]]) for p in lm.parameters()}

    def kind_of(tensor: Tensor) -> str:
        if tensor.shape in weights:
            return COPIES if tensor.dtype == torch.bfloat16 else GRADIENTS
        return LOGITS if tensor.shape[-1:] == (vocabulary,) else ACTIVATIONS

    return kind_of
