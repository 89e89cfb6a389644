"""A causal LM whose weights have no values yet, so that each rank can load its shards alone.

Parameters are on torch's meta device, buffers and the tensors of an adapter are real: adapters are
small, and their initial values come from one stream of random numbers.

`build_skeleton` returns None for a model that cannot be loaded this way: without safetensors files,
quantised, or with tensors that transformers converts while it loads them, such as fused experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from klinic.model.weight_files import WeightFiles, find_weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without values, and the tensors of its files that hold them."""

    lm: Any
    files: WeightFiles
    file_names: dict[str, str]
    """Name of each parameter's tensor in the files, by its name in the model."""

    def file_name(self, parameter: str) -> str:
        """Return the tensor of a base parameter, which an adapter may have renamed."""
        return self.file_names[parameter.removeprefix(ADAPTED_PREFIX).replace(BASE_LAYER, ".")]


ADAPTED_PREFIX = "base_model.model."  # PEFT's names of the base below an adapter
BASE_LAYER = ".base_layer."


def build_skeleton(name: str, *, trust_remote_code: bool) -> Skeleton | None:
    """Return a saved model without values; None if its files cannot be read shard by shard."""
    from transformers import AutoConfig, AutoModelForCausalLM

    files = find_weight_files(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if files is None or getattr(config, "quantization_config", None) is not None:
        return None
    with _parameters_on_meta():
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    lm.tie_weights()
    file_names = _match_parameters(lm, files)
    if file_names is None:
        return None
    _load_buffers(lm, files)
    _load_generation_config(lm, name)
    return Skeleton(lm=lm.eval(), files=files, file_names=file_names)


@contextmanager
def placeholder_values(lm: nn.Module) -> Iterator[None]:
    """Give the parameters CPU values within the context, all of them one zero in memory.

    PEFT puts an adapter where its base is: on the meta device its random start would be lost.
    """
    zero = torch.zeros(())
    address = zero.untyped_storage().data_ptr()
    _replace_parameters(lm, lambda p: p.is_meta, lambda p: zero.to(p.dtype).expand(p.shape))
    try:
        yield
    finally:
        _replace_parameters(
            lm,
            lambda p: p.untyped_storage().data_ptr() == address,
            lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"),
        )


def _replace_parameters(
    lm: nn.Module, selects: Callable[[Tensor], bool], replace: Callable[[Tensor], Tensor]
) -> None:
    """Replace selected parameters; modules that shared one share the new one."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in lm.modules():
        for name, p in list(module._parameters.items()):
            if p is None or not selects(p):
                continue
            if p not in replaced:
                replaced[p] = nn.Parameter(replace(p.detach()), requires_grad=p.requires_grad)
            module._parameters[name] = replaced[p]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every new parameter to the meta device; buffers keep their computed values."""
    register = nn.Module.register_parameter
    deterministic: Any = torch.utils.deterministic
    fills_memory = deterministic.fill_uninitialized_memory

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    # else each new tensor is written before it is dropped
    deterministic.fill_uninitialized_memory = False
    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        deterministic.fill_uninitialized_memory = fills_memory


def _match_parameters(lm: Any, files: WeightFiles) -> dict[str, str] | None:
    """Return the file's tensor of every parameter; None unless each has exactly one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in lm.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    matched: dict[str, str] = {}
    for p, shared in names.items():
        stored = [key for name in shared if (key := _stored_name(name, lm, files)) is not None]
        if len(stored) != 1 or files.shape(stored[0]) != tuple(p.shape):
            return None
        matched |= dict.fromkeys(shared, stored[0])
    return matched


def _stored_name(name: str, lm: Any, files: WeightFiles) -> str | None:
    """Return a tensor's name in the files, which may lack the prefix of the decoder."""
    without_prefix = name.removeprefix(f"{lm.base_model_prefix}.")
    return next((key for key in (name, without_prefix) if key in files), None)


def _load_buffers(lm: Any, files: WeightFiles) -> None:
    """Load the buffers that the files hold; the others are computed from the config."""
    for name, buffer in lm.named_buffers():
        if (key := _stored_name(name, lm, files)) is not None:
            buffer.copy_(files.read_tensor(key))


def _load_generation_config(lm: Any, name: str) -> None:
    """Load the generation config, which may name further tokens that end a completion."""
    from transformers import GenerationConfig

    try:
        lm.generation_config = GenerationConfig.from_pretrained(name)
    except OSError:  # a model may have none
        return
