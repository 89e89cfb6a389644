"""Save and load weights and optimizer state: safetensors, and a model for `from_pretrained`.

The tensors of a moving reference are saved as well; a fixed one is loaded from its source again.
Several ranks write shards next to the model; any number of processes can resume from them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from klinic.errors import CheckpointError
from klinic.model.adapter_files import save_adapter
from klinic.model.adapters import TRAINED_ADAPTER, has_adapter, load_adapter_weights
from klinic.model.loading import Policy, hide_progress_bars
from klinic.model.model_writer import write_model
from klinic.model.moving_reference import MovingReference, MovingReferenceIdentity
from klinic.model.weight_stream import WeightStream
from klinic.model.weights import is_sharded, trainable_tensors

MODEL_DIR = "model"
OPTIMIZER_FILE = "optimizer.safetensors"
SHARDS_DIR = "shards"
REFERENCE_FILE = "reference.safetensors"


def save_learner(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Write the model, its tokenizer and the optimizer state."""
    save_model(folder / MODEL_DIR, policy)
    save_file(_optimizer_tensors(policy, optimizer), folder / OPTIMIZER_FILE)


def save_model(folder: Path, policy: Policy) -> None:
    """Write a model, or only its adapter, and its tokenizer for `from_pretrained`."""
    with hide_progress_bars():
        if has_adapter(policy.lm):
            save_adapter(policy.lm, folder, adapter=TRAINED_ADAPTER)
        else:
            policy.lm.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


def save_sharded_model(folder: Path, policy: Policy) -> None:
    """Write a model of several ranks for `from_pretrained`; rank 0 writes, the others send."""
    lm: Any = policy.lm
    tensors = trainable_tensors(lm) if has_adapter(lm) else dict(lm.named_parameters())
    stream = WeightStream(tensors, dtype=next(iter(tensors.values())).dtype)
    with stream, hide_progress_bars():
        if dist.get_rank() > 0:
            return
        if has_adapter(lm):
            save_adapter(lm, folder, adapter=TRAINED_ADAPTER, tensors=stream.collect())
        elif policy.has_tensors_of_files:
            write_model(lm, folder, stream)
        else:  # transformers makes other tensors of them
            buffers = {name: b for name, b in lm.state_dict().items() if not is_sharded(b)}
            lm.save_pretrained(folder, state_dict={**buffers, **stream.collect()})
        policy.tokenizer.save_pretrained(folder)


def load_learner(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint of one or several processes into model and optimizer."""
    if (folder / SHARDS_DIR).is_dir():
        load_sharded_learner(folder, trainable_tensors(policy.lm), optimizer)
        return
    load_weights(folder / MODEL_DIR, policy)
    names = _parameter_names(policy)
    state: dict[Tensor, dict[str, Tensor]] = {}
    parameters = {name: p for p, name in names.items()}
    for key, tensor in load_file(folder / OPTIMIZER_FILE).items():
        name, _, field = key.rpartition("|")
        if name not in parameters:
            raise CheckpointError(
                f"{folder / OPTIMIZER_FILE} holds the state of {name!r}, which this model does not "
                "train. Resume with the run's original recipe."
            )
        parameter = parameters[name]
        # the step too: fused AdamW reads it on the device of the weights
        state.setdefault(parameter, {})[field] = tensor.to(parameter.device)
    optimizer.state.clear()
    for parameter, fields in state.items():
        optimizer.state[parameter] = dict(fields)


def save_sharded_learner(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Write trained weights and optimizer state; each rank writes its shards."""
    from klinic.learner.sharded_files import save_shards

    tensors = {name: p.detach() for name, p in parameters.items()}
    names = {p: name for name, p in parameters.items()}
    for parameter, fields in optimizer.state.items():
        tensors |= {f"{names[parameter]}|{field}": value for field, value in fields.items()}
    save_shards(folder / SHARDS_DIR, tensors)


def load_sharded_learner(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Load a checkpoint of one or several processes into any number of shards."""
    from klinic.learner.sharded_files import load_shards, saved_tensor_names

    weights = {name: p.detach() for name, p in parameters.items()}
    is_sharded = (folder / SHARDS_DIR).is_dir()
    source = folder / SHARDS_DIR if is_sharded else folder
    tensors = dict(weights) if is_sharded else {}
    optimizer.state.clear()
    for key in saved_tensor_names(source):
        name, bar, field = key.rpartition("|")
        if not bar or name not in parameters:
            continue
        like = parameters[name].detach()
        # the step too: fused AdamW reads it on the device of the weights
        tensors[key] = (
            torch.zeros((), device=like.device) if field == "step" else torch.zeros_like(like)
        )
        optimizer.state[parameters[name]][field] = tensors[key]
    load_shards(source, tensors)
    if not is_sharded:  # a single process saves a model, whose tensor names omit the adapter's
        load_shards(
            folder / MODEL_DIR,
            {n.replace(f".{TRAINED_ADAPTER}.", "."): p for n, p in weights.items()},
        )


def save_reference(folder: Path, reference: MovingReference) -> MovingReferenceIdentity:
    """Write the tensors of a moving reference; return its identity."""
    tensors = {name: p.detach().contiguous() for name, p in reference.reference_tensors.items()}
    save_file(tensors, folder / REFERENCE_FILE)
    return reference.identity()


def load_reference(
    folder: Path, reference: MovingReference, identity: MovingReferenceIdentity | None
) -> None:
    """Load a moving reference, and check that it is the one that was saved."""
    if identity is None:
        raise CheckpointError(
            f"{folder} is a checkpoint with a fixed reference, but the recipe lets it move. "
            "Resume with the run's original recipe."
        )
    reference.restore_tensors(load_file(folder / REFERENCE_FILE), identity)


def load_weights(folder: Path, policy: Policy) -> None:
    """Copy saved weights into the policy in place."""
    lm: Any = policy.lm
    if has_adapter(lm):
        load_adapter_weights(lm, folder)
        return
    from transformers import AutoModelForCausalLM

    with hide_progress_bars():
        saved = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=policy.trust_remote_code,
            use_safetensors=True,
        ).state_dict()
    with torch.no_grad():
        for name, tensor in lm.state_dict().items():
            tensor.copy_(saved[name])


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = _parameter_names(policy)
    return {
        f"{names[parameter]}|{field}": value
        for parameter, fields in optimizer.state.items()
        for field, value in fields.items()
    }


def _parameter_names(policy: Policy) -> dict[Tensor, str]:
    return {p: name for name, p in policy.lm.named_parameters()}
