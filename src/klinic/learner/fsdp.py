"""A learner over several processes: FSDP2 shards the weights, each rank has its own rows.

Every rank makes the same calls with the same record and runs its own micro-batches; FSDP2 gathers
the weights of a layer while it is used and sums its gradients. Loss, estimators and probes are
those of one process.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from klinic.errors import PolicyError
from klinic.learner import checkpoint
from klinic.learner.local import LocalLearner
from klinic.learner.objective import Objective
from klinic.learner.process_group import ProcessGroup
from klinic.learner.protocol import LearnerState
from klinic.learner.settings import LearnerSettings
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer
from klinic.model.weights import Weights, fingerprint, full_tensor

FORWARD_METHODS = ("hidden", "score", "score_and_loss", "logits_of", "kept_tokens")
"""Methods of a scorer that are called besides its forward; they need gathered weights as well."""


class TorchProcessGroup:
    """The default torch process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the all-reduced sum."""
        total = values.clone()
        dist.all_reduce(total)
        return total


def shard_scorer(scorer: TokenScorer, mesh: DeviceMesh | None = None) -> None:
    """Shard a model's weights over the ranks, layer by layer.

    The embeddings and the head stay gathered until the backward pass has used them. Weights are
    gathered in fp32 even where autocast computes in bf16, so results equal those of one process
    bitwise.
    """
    mesh = init_device_mesh(_device_type(), (dist.get_world_size(),)) if mesh is None else mesh
    for layer in _decoder_layers(scorer.lm):
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # the loss is a sum over all rows of the step; gloo has no scaled sums
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in FORWARD_METHODS:
        register_fsdp_forward_method(scorer, name)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _decoder_layers(lm: Any) -> list[nn.Module]:
    """Return the blocks of a decoder: its outermost list of modules."""
    for module in lm.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module):
            return list(module)
    raise PolicyError(
        f"{type(lm).__name__} has no list of layers, so its weights cannot be sharded layer by "
        "layer. Use learner.shards 1."
    )


class FsdpLearner(LocalLearner):
    """One rank of a sharded learner. Every rank must make the same calls."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        objective: Objective,
        settings: LearnerSettings,
        group: ProcessGroup,
        published: Policy | None,
    ) -> None:
        """Shard a policy, and its reference if that has its own weights.

        `published` is a full copy of the policy on the rank that samples, None on the others.
        """
        shard_scorer(policy.scorer)
        if reference is not None and reference.kind == "copy":
            shard_scorer(reference.scorer)
        super().__init__(policy, reference, objective=objective, settings=settings, group=group)
        self._published = published
        self._published_at: int | None = None

    @torch.no_grad()
    def publish(self) -> Weights:
        """Gather the current weights into the copy that the sampler uses."""
        if self._published_at != self._num_updates:
            copies = {} if self._published is None else dict(self._published.lm.named_parameters())
            for name, p in self._trained.items():
                gathered = full_tensor(p)
                if self._published is not None:
                    copies[name].copy_(gathered)
            self._published_at = self._num_updates
        published_fingerprint = "" if self._published is None else fingerprint(self._published.lm)
        return Weights(
            version=self._num_updates, fingerprint=published_fingerprint, location="process"
        )

    def save(self, folder: Path) -> LearnerState:
        """Write the shards, and the full model for `from_pretrained`."""
        self.publish()
        if self._published is not None:
            checkpoint.save_model(folder / checkpoint.MODEL_DIR, self._published)
        checkpoint.save_sharded_learner(folder, self._trained, self._optimizer)
        return {"num_updates": self._num_updates}

    def load(self, folder: Path, state: LearnerState) -> None:
        """Load a checkpoint that any number of processes wrote."""
        checkpoint.load_sharded_learner(folder, self._trained, self._optimizer)
        self._num_updates = int(state["num_updates"])
        self._published_at = None
        self.discard()
