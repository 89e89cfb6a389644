"""The layouts of a TRL trainer over several processes.

    layout            weights   gradients              update
    DDP               copies    summed in `.grad`      after the callback before an update
    FSDP2             shards    shards in `.grad`      after it
    DeepSpeed ZeRO-2  copies    shards of DeepSpeed    within the backward pass
    DeepSpeed ZeRO-3  shards    shards of DeepSpeed    within the backward pass

With sharded weights every forward and backward pass is a collective: all processes must make the
same ones.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from klinic.errors import ConfigError
from klinic.model.weights import trainable_tensors
from klinic.model.zero_shards import is_zero_shard

ZERO_3 = 3  # the stage of DeepSpeed that shards the weights
NO_GRADIENTS = (
    "DeepSpeed's ZeRO-3 gathers no gradient outside its own backward pass, so the probes of the "
    "gradient do not run: whether the KL and the advantages reach it is not examined. ZeRO-2, DDP "
    "and FSDP2 allow them."
)


def zero_stage(trainer: Any) -> int:
    """Return the stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
    if not trainer.is_deepspeed_enabled:
        return 0
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage)


def is_sharded(trainer: Any) -> bool:
    """Whether the processes share one copy of the weights."""
    return bool(trainer.accelerator.is_fsdp2) or zero_stage(trainer) == ZERO_3


def has_gradients(trainer: Any) -> bool:
    """Whether a gradient can be computed without an update."""
    return zero_stage(trainer) != ZERO_3


def without_wrapper(model: Any) -> Any:
    """Return the model inside DDP or DeepSpeed's engine; with copies its passes are local."""
    is_wrapper = isinstance(model, DistributedDataParallel) or is_deepspeed_engine(model)
    return model.module if is_wrapper else model


def is_deepspeed_engine(model: Any) -> bool:
    """Whether a model is wrapped by DeepSpeed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def local_shard(parameter: Tensor) -> Tensor:
    """Return the entries of a parameter that this process holds."""
    if is_zero_shard(parameter):
        return parameter.ds_tensor.detach()  # type: ignore[attr-defined, no-any-return]
    entries = parameter.detach()
    return entries.to_local() if isinstance(entries, DTensor) else entries


def loss_gradients(trainer: Any, model: Any, loss: Tensor) -> list[Tensor]:
    """Return the gradient of each trained tensor, 0 where it is unused; `.grad` is unchanged.

    Under FSDP2 it is the mean over all processes.
    """
    parameters = list(trainable_tensors(model).values())
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    if trainer.accelerator.is_fsdp2:
        gradients = _backward_shards(trainer, model, loss)
    else:
        gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    pairs = zip(parameters, gradients, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def _backward_shards(trainer: Any, model: Any, loss: Tensor) -> list[Tensor | None]:
    """Run a backward pass: only that fills the gradients of shards."""
    parameters = list(trainable_tensors(model).values())
    previous = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    # accelerate switches it off while gradients are accumulated
    model.set_requires_gradient_sync(True)
    try:
        torch.autograd.backward(loss)
        return [p.grad for p in trainable_tensors(model).values()]
    finally:
        model.set_requires_gradient_sync(bool(trainer.accelerator.sync_gradients))
        for p, gradient in zip(trainable_tensors(model).values(), previous, strict=True):
            p.grad = gradient


def reject_unsupported_layout(trainer: Any, *, monitors: bool, recovers: bool = False) -> None:
    """Raise `ConfigError` for a layout, or an option in it, that klinic does not support."""
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise ConfigError(
            "this trainer uses the first FSDP, which flattens the weights of a layer into one "
            "tensor, and klinic reads them by name. Set fsdp_version: 2."
        )
    sizes = trainer.accelerator.parallelism_config
    kinds = ("dp_replicate", "tp", "cp", "sp")
    other = [kind for kind in kinds if sizes is not None and getattr(sizes, f"{kind}_size", 1) > 1]
    if other:
        raise ConfigError(
            f"this trainer uses {', '.join(other)} of accelerate's parallelism_config: klinic "
            "supports DDP, FSDP2 and DeepSpeed over all processes. Leave it out."
        )
    if recovers and trainer.is_deepspeed_enabled:
        raise ConfigError(
            "recovery decides before each update whether to apply it, and DeepSpeed updates "
            "within its backward pass. Leave recovery out, or use DDP or FSDP2."
        )
    if (
        monitors
        and is_sharded(trainer)
        and trainer.beta == 0
        and not hasattr(trainer.model, "peft_config")
    ):
        raise ConfigError(
            "monitor_kl_every at beta 0 keeps a copy of the weights at the start, which klinic "
            "cannot swap in where weights are sharded (FSDP2, ZeRO-3). Train an adapter, set a "
            "small beta, or leave it out."
        )
