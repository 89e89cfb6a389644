"""Loads policy and reference shard by shard: a rank reads its own rows from safetensors files.

The model is built without values (`klinic.model.skeleton`) and sharded; then every rank reads its
rows of each tensor. A rank never holds more than its shards, and, while the loaded model is
checked, the gathered weights of one layer. Adapters are whole on every rank: they are small.

The weights equal those of `load_policy` bitwise. A function returns None for a model that cannot be
loaded this way; the caller then loads it whole.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from klinic.learner.fsdp import release_gathered, shard_scorer, sum_head_gradient
from klinic.model.adapter_files import is_adapter
from klinic.model.adapters import add_frozen_copy, starts_at_zero
from klinic.model.attention import refuse_missing_kernel, select_attention
from klinic.model.device import resolve_device
from klinic.model.dropout import disable_dropout
from klinic.model.frozen_base import store_base_in_bf16
from klinic.model.loading import (
    Policy,
    check_log_probs,
    load_tokenizer,
    make_policy,
    make_scorer,
    refuse_other_tokenizer,
    refuse_other_vocabulary,
)
from klinic.model.outline import add_adapter, find_skeleton, skeleton_of
from klinic.model.scorer import TokenScorer
from klinic.model.skeleton import Skeleton, placeholder_values

if TYPE_CHECKING:
    from klinic.recipe.sections import ModelSection


def load_policy_shards(
    section: "ModelSection",
    *,
    temperature: float,
    seed: int,
    mesh: DeviceMesh,
    copies_start: bool,
    tokenizer: Any = None,
) -> Policy | None:
    """Return the policy of a recipe's `model` section, sharded.

    `copies_start` adds a frozen copy of an adapter that does not start at 0, as the reference.
    `tokenizer` replaces that of the model's folder.
    """
    refuse_missing_kernel(section.attention, resolve_device(section.device), section.dtype)
    skeleton = find_skeleton(section)
    if skeleton is None:
        return None
    lm = skeleton.lm
    with placeholder_values(lm):
        lm = add_adapter(lm, section, seed=seed)
        if copies_start and not starts_at_zero(lm):
            add_frozen_copy(lm)
    if section.dtype == "bf16":
        store_base_in_bf16(lm, is_exact=_ExactInBf16(lm, skeleton, mesh))
    scorer = make_scorer(lm, section, temperature=temperature)
    _shard_and_fill(scorer, skeleton, mesh)
    check_log_probs(scorer, section.name)
    release_gathered(scorer)
    if tokenizer is None:
        tokenizer = load_tokenizer(section.name, trust_remote_code=section.trust_remote_code)
    policy = make_policy(scorer, tokenizer, section)
    has_persistent_buffers = len(lm.state_dict()) > len(
        dict(lm.named_parameters(remove_duplicate=False))
    )
    return replace(policy, has_tensors_of_files=not has_persistent_buffers)


def load_reference_shards(name: str, *, like: Policy, mesh: DeviceMesh) -> TokenScorer | None:
    """Return a saved model as a sharded scorer with temperature and precision of a policy."""
    trust_remote_code = like.trust_remote_code
    skeleton = skeleton_of(name, trust_remote_code=trust_remote_code)
    if skeleton is None or is_adapter(name):
        return None
    lm = skeleton.lm
    if name != like.name:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        refuse_other_tokenizer(tokenizer, like, where=f"reference.path is {name}")
        refuse_other_vocabulary(lm, like, where=f"reference.path is {name}")
    disable_dropout(lm)
    select_attention(lm, like.attention, name)
    lm.requires_grad_(False)
    scorer = TokenScorer(lm, temperature=like.scorer.temperature, autocast=like.scorer.autocast)
    _shard_and_fill(scorer, skeleton, mesh)
    if name != like.name:
        check_log_probs(scorer, name)
        release_gathered(scorer)
    return scorer


def _shard_and_fill(scorer: TokenScorer, skeleton: Skeleton, mesh: DeviceMesh) -> None:
    """Shard a model without values, and load this rank's rows of every parameter."""
    shard_scorer(scorer, mesh)
    loaded: dict[nn.Parameter, nn.Parameter] = {}
    for name, p in scorer.lm.named_parameters():
        if p.to_local().is_meta:
            loaded[p] = nn.Parameter(
                _load_shard(p, skeleton, skeleton.file_name(name)), requires_grad=p.requires_grad
            )
    # as `load_state_dict(assign=True)` does: FSDP2 takes the new parameters before the first pass
    for module in scorer.modules():
        for name, p in list(module._parameters.items()):
            if p in loaded:
                setattr(module, name, loaded[p])
    sum_head_gradient(scorer)


def _load_shard(like: Any, skeleton: Skeleton, file_name: str) -> DTensor:
    """Return a sharded tensor with this rank's rows from the files."""
    shape, start = _own_rows(like, like.device_mesh)
    local = torch.empty(shape, dtype=like.dtype, device=like.device_mesh.device_type)
    if local.numel():
        local.copy_(skeleton.files.read_rows(file_name, start, start + shape[0]))
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _own_rows(like: Any, mesh: DeviceMesh) -> tuple[tuple[int, ...], int]:
    """Return the shape of this rank's shard and its first row."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, like.placements)
    return tuple(shape), offset[0]


class _ExactInBf16:
    """Whether bf16 holds every entry of a base weight, which no rank has whole.

    Every rank makes the same calls and reads an equal number of rows.
    """

    def __init__(self, lm: nn.Module, skeleton: Skeleton, mesh: DeviceMesh) -> None:
        self._names = {p: skeleton.file_name(n) for n, p in lm.named_parameters() if p.is_meta}
        self._files = skeleton.files
        self._device_type = mesh.device_type

    def __call__(self, weight: Tensor) -> bool:
        name = self._names[weight]  # type: ignore[index]
        if self._files.is_bf16(name):
            return True
        rank, size = dist.get_rank(), dist.get_world_size()
        starts = [len(weight) * part // size for part in (rank, rank + 1)]
        rows = self._files.read_rows(name, *starts)
        is_exact = torch.equal(rows, rows.to(torch.bfloat16).to(rows.dtype))
        num_exact = torch.tensor(int(is_exact), device=self._device_type)
        dist.all_reduce(num_exact)
        return int(num_exact) == size
