"""The layouts of a TRL trainer over several processes: copies (DDP) or shards (FSDP2).

Under FSDP2 every forward and backward pass is a collective: all processes must make the same ones.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from klinic.errors import ConfigError
from klinic.model.weights import trainable_tensors


def is_sharded(trainer: Any) -> bool:
    """Whether the processes share one copy of the weights."""
    return bool(trainer.accelerator.is_fsdp2)


def without_ddp(model: Any) -> Any:
    """Return the model inside DDP, whose passes involve no other process."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local_shard(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_gradients(trainer: Any, model: Any, loss: Tensor) -> list[Tensor]:
    """Return the gradient of each trained tensor, 0 where it is unused; `.grad` is unchanged.

    Under FSDP2 it is the mean over all processes.
    """
    parameters = list(trainable_tensors(model).values())
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    if is_sharded(trainer):
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


def reject_unsupported_layout(trainer: Any, *, monitors: bool) -> None:
    """Raise `ConfigError` for a distribution of the weights that klinic cannot read."""
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "this trainer uses DeepSpeed, which splits weights and gradients in a way that klinic "
            "cannot read. Use DDP or FSDP2 (fsdp_version: 2), or attach to a short run on one "
            "device."
        )
    if trainer.is_fsdp_enabled and not is_sharded(trainer):
        raise ConfigError(
            "this trainer uses the first FSDP, which flattens the weights of a layer into one "
            "tensor, and klinic reads them by name. Set fsdp_version: 2."
        )
    sizes = accelerator.parallelism_config
    kinds = ("dp_replicate", "tp", "cp", "sp")
    other = [kind for kind in kinds if sizes is not None and getattr(sizes, f"{kind}_size", 1) > 1]
    if other:
        raise ConfigError(
            f"this trainer uses {', '.join(other)} of accelerate's parallelism_config: klinic "
            "supports DDP, and FSDP2 over all processes. Leave it out."
        )
    if (
        monitors
        and is_sharded(trainer)
        and trainer.beta == 0
        and not hasattr(trainer.model, "peft_config")
    ):
        raise ConfigError(
            "monitor_kl_every at beta 0 keeps a copy of the weights at the start, which klinic "
            "cannot swap in under FSDP2. Train an adapter, set a small beta, or leave it out."
        )
