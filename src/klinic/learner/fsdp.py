"""A learner over several processes: FSDP2 shards the weights, each rank has its own rows.

Every rank makes the same calls, with its share of the rows or with the same record, and runs its
own micro-batches; FSDP2 gathers the weights of a layer while it is used and sums its gradients.
Loss, estimators and probes are those of one process.

With replicas, consecutive ranks share one set of shards, and every set has all weights: gathers
stay inside a set, for example a machine, and only gradients cross its border.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial

from klinic.errors import PolicyError
from klinic.evidence.record import ProbeResult, StepRecord
from klinic.learner import checkpoint
from klinic.learner.local import LocalLearner
from klinic.learner.objective import LossTerms, Objective
from klinic.learner.packing import lay_out_batches, split_rows
from klinic.learner.protocol import LearnerState
from klinic.learner.row_shares import RowShare
from klinic.learner.scored_batch import ScoredBatch
from klinic.learner.settings import LearnerSettings
from klinic.learner.step_rows import StepRows
from klinic.model.adapters import has_adapter
from klinic.model.device import release_cached_memory
from klinic.model.equivalence import probe_layout
from klinic.model.frozen_base import compute_in_input_dtype
from klinic.model.loading import Policy
from klinic.model.policy_source import CompletionIds, PromptIds
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer
from klinic.model.token_scores import TokenScores
from klinic.model.weights import Weights

FORWARD_METHODS = (
    *("hidden", "decode", "score", "score_and_loss", "logits_of", "kept_tokens"),
    "logits_of_head_and_model",
)
"""Methods of a scorer that are called besides its forward; they need gathered weights as well."""

BF16_GATHERS = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
"""Weights in bf16 while they are gathered, gradients summed in fp32, inputs as they are."""


class TorchProcessGroup:
    """The default torch process group, and the type of device that its ranks compute on."""

    def __init__(self, device_type: str | None = None, *, replicas: int = 1) -> None:
        """Take the number of sets of ranks that each hold all weights."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._replicas = replicas
        self._device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, as one dimension to shard over, below one of replicas if there are any."""
        if self._replicas == 1:
            return init_device_mesh(self._device_type, (self.size,))
        sizes = (self._replicas, self.size // self._replicas)
        return init_device_mesh(self._device_type, sizes, mesh_dim_names=("replicas", "shards"))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the all-reduced sum."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the all-reduced maximum."""
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest


def shard_scorer(scorer: TokenScorer, mesh: DeviceMesh) -> None:
    """Shard a model's weights over the ranks, layer by layer; without effect if they are.

    The head stays gathered after a pass without a gradient, so `FsdpLearner` releases it.
    """
    if isinstance(scorer, FSDPModule):
        return
    layers = _decoder_layers(scorer.lm)
    _shard_layers(layers, mesh, in_bf16=scorer.autocast == torch.bfloat16)
    for embedding in _separate_embedding(scorer.lm):
        fully_shard(embedding, mesh=mesh)
        # its gradient does not depend on its weights
        embedding.set_unshard_in_backward(False)  # type: ignore[operator]
    for module in _modules_beside(layers, scorer.lm):
        fully_shard(module, mesh=mesh)
    fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # the loss is a sum over all rows of the step; gloo has no scaled sums
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in FORWARD_METHODS:
        register_fsdp_forward_method(scorer, name)
    sum_head_gradient(scorer)


def sum_head_gradient(scorer: TokenScorer) -> None:
    """Let the head add its gradient to the shards of its weight as it is now.

    To be called again after the weight was replaced. It cannot be looked up in the backward pass,
    where the module holds the gathered weight.
    """
    scorer.head.add_gradient = partial(_add_to_shards, scorer.lm.get_output_embeddings().weight)


def _shard_layers(layers: Sequence[nn.Module], mesh: DeviceMesh, *, in_bf16: bool) -> None:
    """Shard decoder layers; `in_bf16` gathers the weights of their linear layers in bf16.

    Autocast rounds those weights to bf16 anyway: forward and backward pass stay bitwise the same.
    Shards, sums of gradients and all other weights, such as those of norms, keep their dtype.
    """
    for layer in layers:
        linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        if not (in_bf16 and linear):
            fully_shard(layer, mesh=mesh)
            continue
        for module in _other_owners(layer):
            fully_shard(module, mesh=mesh)
        for module in linear:
            compute_in_input_dtype(module)
        fully_shard(layer, mesh=mesh, mp_policy=BF16_GATHERS)
    for earlier, later in pairwise(layers):
        # by default the norms of a layer would be prefetched, and the layer before it too late
        later.set_modules_to_backward_prefetch([earlier])  # type: ignore[operator]


def _other_owners(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a layer that own parameters and are no linear layers."""
    for module in layer.modules():
        if module is not layer and module._parameters and not isinstance(module, nn.Linear):
            yield module


def _add_to_shards(weight: Tensor, gradient: Tensor) -> None:
    """Sum a gradient over the ranks into each rank's shard of the weight's gradient.

    FSDP2 does so when the backward pass ends. The head's gradient exists when it begins, and is as
    large as the head: kept in full, it would add to the memory of every layer.
    """
    assert isinstance(weight, DTensor)  # noqa: S101 - sharded above
    with torch.no_grad():
        partial_sums = [Partial()] * weight.device_mesh.ndim
        own = DTensor.from_local(gradient, weight.device_mesh, partial_sums, run_check=False)
        summed = own.redistribute(placements=weight.placements)
        if weight.grad is None:
            weight.grad = summed
        else:
            weight.grad += summed


def _decoder_layers(lm: Any) -> list[nn.Module]:
    """Return the blocks of a decoder: its outermost list of modules."""
    for module in lm.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module):
            return list(module)
    raise PolicyError(
        f"{type(lm).__name__} has no list of layers, so its weights cannot be sharded layer by "
        "layer. Use learner.shards 1."
    )


def _modules_beside(layers: Sequence[nn.Module], lm: Any) -> Iterator[nn.Module]:
    """Yield the modules of a decoder with weights of their own, such as its last norm.

    Its layers and the embedding are no such modules.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    embedding = lm.get_input_embeddings()
    for module in lm.get_decoder().modules():
        is_leaf = bool(module._parameters) and next(module.children(), None) is None
        if is_leaf and id(module) not in inside and module is not embedding:
            yield module


def _separate_embedding(lm: Any) -> list[nn.Module]:
    """Return the input embedding, unless it shares its weights with the head."""
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    return [] if embedding.weight is head.weight else [embedding]


def _holds_head_alone(scorer: TokenScorer) -> bool:
    """Whether every weight outside of the modules that are sharded apart is the head's."""
    inner = {
        id(p)
        for module in scorer.modules()
        if isinstance(module, FSDPModule) and id(module) != id(scorer)
        for p in module.parameters()
    }
    heads = {id(p) for p in scorer.lm.get_output_embeddings().parameters()}
    return all(id(p) in inner or id(p) in heads for p in scorer.parameters())


def release_gathered(scorer: nn.Module) -> None:
    """Release gathered weights after a pass without a gradient: no backward pass does it."""
    assert isinstance(scorer, FSDPModule)  # noqa: S101 - sharded by shard_scorer
    scorer.reshard()


class FsdpLearner(LocalLearner):
    """One rank of a sharded learner. Every rank must make the same calls."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        objective: Objective,
        settings: LearnerSettings,
        group: TorchProcessGroup,
        teacher: Reference | None = None,
    ) -> None:
        """Shard a policy, and reference and teacher if they have their own weights.

        Models that are sharded already stay as they are.
        """
        shard_scorer(policy.scorer, group.mesh)
        for frozen in (reference, teacher):
            if frozen is not None and frozen.kind == "copy":
                shard_scorer(frozen.scorer, group.mesh)
        super().__init__(
            policy,
            reference,
            objective=objective,
            settings=settings,
            group=group,
            teacher=teacher,
        )
        if has_adapter(policy.lm):
            self._fix_gradient_dtypes()

    @torch.no_grad()
    def _fix_gradient_dtypes(self) -> None:
        """Make the first pass one with the adapter enabled.

        In its first pass FSDP2 reads the dtype of gradients from the trainable weights. A disabled
        adapter is not trainable: its gradients would be summed in bf16.
        """
        self.scorer.hidden(probe_layout(self.policy.lm, self.scorer.device))
        release_gathered(self.scorer)

    def score(self, record: StepRecord, *, needs_reference: bool) -> ScoredBatch:
        """Score a batch, then release the embeddings and heads that it left gathered."""
        return self._release_scored(super().score(record, needs_reference=needs_reference))

    def score_share(self, share: RowShare, *, needs_reference: bool) -> ScoredBatch:
        """Score this rank's rows of a batch."""
        batches = self.with_kept_tokens(
            lay_out_batches(
                share.record,
                share.row_sets(),
                pad_id=self.policy.pad_id,
                device=self.scorer.device,
                packed=self.settings.packed,
            )
        )
        rows = StepRows(record=share.record, batches=batches, group=self.group, share=share)
        return self._release_scored(self._score_rows(rows, needs_reference=needs_reference))

    def _release_scored(self, scored: ScoredBatch) -> ScoredBatch:
        """Release the weights that scoring left gathered."""
        release_gathered(self.scorer)
        self._release_frozen()
        return scored

    def split_rows(self, record: StepRecord) -> list[np.ndarray]:
        """Return the rows of every micro-batch of a step, for `share_of_rank`."""
        return split_rows(
            record,
            size=self.settings.micro_batch_size,
            num_ranks=self.group.size,
            packed=self.settings.packed,
        )

    def rescore(self, scored: ScoredBatch) -> Tensor:
        """Return the log-probs of a batch under the current policy, then release its weights."""
        logp = super().rescore(scored)
        release_gathered(self.scorer)
        return logp

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, ProbeResult]:
        """Run the active probes, then release the weights that they gathered."""
        results = super().probe(record, kl_coef=kl_coef)
        release_gathered(self.scorer)
        self._release_frozen()
        return results

    def _backprop_batches(
        self,
        scored: ScoredBatch,
        objective: Objective,
        to_scalar: Callable[[LossTerms], Tensor],
    ) -> list[TokenScores]:
        """Run every micro-batch; the head is not gathered again for the backward pass.

        A fused loss has made its gradient by then. Probes differentiate through the head.
        """
        root: Any = self.scorer
        root.set_unshard_in_backward(not self._holds_head_alone)
        try:
            return super()._backprop_batches(scored, objective, to_scalar)
        finally:
            root.set_unshard_in_backward(True)

    @cached_property
    def _holds_head_alone(self) -> bool:
        """Whether the root of the model has the head and no other weights."""
        return _holds_head_alone(self.scorer)

    def _release_frozen(self) -> None:
        """Release the heads of reference and teacher, where they have their own weights."""
        for frozen in (self.reference, self.teacher):
            if frozen is not None and frozen.kind == "copy":
                release_gathered(frozen.scorer)

    def publish(self) -> Weights:
        """Return the identity of the current weights."""
        weights = super().publish()
        release_cached_memory()
        # an engine on the GPUs of these ranks wakes next: all of them have released their memory
        self.group.all_reduce_sum(torch.zeros(1))
        return weights

    def completion_logits(
        self, prompt: PromptIds, token_ids: CompletionIds, *, adapter: bool = True
    ) -> Float[np.ndarray, "n V"]:
        """Return the logits of each token of a completion, then release the weights."""
        logits = super().completion_logits(prompt, token_ids, adapter=adapter)
        release_gathered(self.scorer)
        return logits

    def save(self, folder: Path) -> LearnerState:
        """Write the shards, and the full model for `from_pretrained`."""
        checkpoint.save_sharded_learner(folder, self._trained, self._optimizer)
        # last: no rank waits in a collective, which has a time limit, for a slow disk of rank 0
        checkpoint.save_sharded_model(folder / checkpoint.MODEL_DIR, self.policy)
        return {"num_updates": self._num_updates}

    def load(self, folder: Path, state: LearnerState) -> None:
        """Load a checkpoint that any number of processes wrote."""
        release_gathered(self.scorer)  # gathered weights would outlive the shards they came from
        checkpoint.load_sharded_learner(folder, self._trained, self._optimizer)
        self._num_updates = int(state["num_updates"])
        self.discard()
