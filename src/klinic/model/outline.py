"""A policy whose base has no values: tokenizer, shapes and adapter, for what samples elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.model.adapter_files import base_model_name, is_adapter, is_independent_of_base
from klinic.model.adapters import load_adapter
from klinic.model.loading import (
    BUILT_IN_MODELS,
    Policy,
    add_section_adapter,
    disable_padding_warning,
    load_policy,
    load_tokenizer,
    make_policy,
    make_scorer,
)
from klinic.model.skeleton import Skeleton, build_skeleton, placeholder_values

if TYPE_CHECKING:
    from klinic.recipe.sections import ModelSection


def load_outline(
    section: "ModelSection", *, temperature: float, seed: int, tokenizer: Any = None
) -> Policy:
    """Return the policy of a recipe's `model` section without the values of its base.

    A model that cannot be built without values is loaded whole. `tokenizer` replaces that of the
    model's folder.
    """
    skeleton = find_skeleton(section)
    if skeleton is None:
        whole = section.model_copy(update={"device": "cpu"})
        return load_policy(whole, temperature=temperature, seed=seed, tokenizer=tokenizer)
    with placeholder_values(skeleton.lm):
        lm = add_adapter(skeleton.lm, section, seed=seed)
    if tokenizer is None:
        tokenizer = load_tokenizer(section.name, trust_remote_code=section.trust_remote_code)
    return make_policy(make_scorer(lm, section, temperature=temperature), tokenizer, section)


def find_skeleton(section: "ModelSection") -> Skeleton | None:
    """Return the skeleton of a policy's model, or of the base of its adapter, if it has one."""
    name = section.name
    if is_adapter(name) and section.lora_rank is not None:  # it is merged into its base
        return None
    return skeleton_of(name, trust_remote_code=section.trust_remote_code)


def skeleton_of(name: str, *, trust_remote_code: bool) -> Skeleton | None:
    """Return the skeleton of a model, or of an adapter's base."""
    if is_adapter(name):
        if not is_independent_of_base(Path(name)):
            return None
        name = base_model_name(Path(name))
    if name in BUILT_IN_MODELS:
        return None
    skeleton = build_skeleton(name, trust_remote_code=trust_remote_code)
    if skeleton is not None:
        disable_padding_warning(skeleton.lm)
    return skeleton


def add_adapter(lm: Any, section: "ModelSection", *, seed: int) -> Any:
    """Return a model with placeholder values with the adapter of a `model` section, if it has one.

    The adapter has values.
    """
    if is_adapter(section.name):
        lm = load_adapter(lm, Path(section.name))
    return add_section_adapter(lm, section, seed=seed)
