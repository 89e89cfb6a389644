"""What two processes do in `test_fsdp.py`: this file is run once for each of them.

python rpc_ranks.py RANK SIZE FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.loading import Policy
from klinic.model.reference import (
    Reference,
    make_adapter_frozen_reference,
    make_adapter_off_reference,
)
from klinic.model.weights import full_tensor
from tiny_policies import (
    batch_of,
    drifted_reference,
    learner_of,
    rollouts,
    small_model,
    small_policy,
)

MICRO = 3  # of 8 rows: three micro-batches, and one more that does not count
KL_COEF = 0.3
KINDS = ("full", "lora", "frozen", "checkpointed", "single")
"""`single` is float32; the others are float64, where nothing is lost in rounding."""
ROUNDED = ("bf16", "bf16 lora", "bf16 lora, own head")
"""Weights that are used in bf16, and stored in it under an adapter: a gradient to its rounding."""
UNTIED = ("own head", "bf16 lora, own head")
"""Models whose embedding is sharded apart from the head."""
GRADIENT_ONLY = (*ROUNDED, "own head")
WHOLE = ("unbiased", "exact")
"""Estimators with which everything is done; with the others, a gradient is computed."""


def estimators_of(kind: str) -> tuple[str, ...]:
    """Return the estimators that a kind of policy is tried with."""
    if kind in GRADIENT_ONLY:
        return ("unbiased",)
    return tuple(ESTIMATORS) if kind in ("full", "lora") else WHOLE


def policy_of(kind: str) -> Policy:
    """Return a policy of one kind, the same in every process."""
    changes: dict[str, Any] = {"gradient_checkpointing": kind == "checkpointed"}
    if kind == "frozen" or "lora" in kind:
        changes |= {"lora_rank": 2}
    if kind in ROUNDED:
        changes |= {"dtype": "bf16"}
    if kind in UNTIED:
        changes |= {"model": _model_with_own_head()}
    policy = small_policy(double=kind not in ("single", *ROUNDED), **changes)
    if (
        kind == "frozen" or "lora" in kind
    ):  # matrices that start at 0 have no gradient in the first ones
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(3)
            for name, p in policy.lm.named_parameters():
                if p.requires_grad and (kind == "frozen" or ".lora_A." in name):
                    p.add_(0.1 * torch.randn_like(p))
    return policy


def _model_with_own_head() -> Any:
    """Return the small model with a head apart from its embedding, in entries that bf16 holds."""
    lm = small_model()
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(0.9 * lm.lm_head.weight.detach())
    return lm.to(torch.bfloat16).to(torch.float32)


def reference_of(kind: str, policy: Policy) -> Reference:
    """Return a reference that is not where the policy is, of the kind that its policy has."""
    match kind:
        case "lora" | "bf16 lora" | "bf16 lora, own head":
            return make_adapter_off_reference(policy.scorer, source="small")
        case "frozen":
            reference = make_adapter_frozen_reference(policy.scorer, source="small")
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(4)
                for name, p in policy.lm.named_parameters():
                    if ".reference." in name:
                        p.add_(0.1 * torch.randn_like(p))
            return reference
        case _:
            return drifted_reference(policy)


def wound_up(kind: str, estimator: str) -> LocalLearner:
    """Return a learner of one process."""
    policy = policy_of(kind)
    reference = reference_of(kind, policy)
    return learner_of(policy, reference, micro_batch_size=MICRO, estimator=estimator)


def sharded(kind: str, estimator: str) -> FsdpLearner:
    """Return this process's part of the same learner."""
    alone = wound_up(kind, estimator)
    return FsdpLearner(
        alone.policy,
        alone.reference,
        objective=alone.objective,
        settings=alone.settings,
        group=TorchProcessGroup(),
    )


def batch(step: int = 11) -> Any:
    """Return the rows of a step; at step 11 the KL's share of the gradient is looked at."""
    return batch_of(rollouts(num_prompts=2), step=step)


def gradient_of(learner: LocalLearner, estimator: str) -> torch.Tensor:
    """Return the gradient with another estimator; nothing moves."""
    learner.objective = replace(learner.objective, estimator=estimator)
    scored = learner.score(batch(step=2), needs_reference=True)
    learner.prepare(scored, LossScales(kl_coef=KL_COEF))
    gradient = torch.cat([full_tensor(g).flatten() for g in learner.current_gradients()])
    learner.discard()
    return gradient


def first_step(learner: LocalLearner) -> dict[str, Any]:
    """Prepare and commit a step; return all that can be compared."""
    scored = learner.score(batch(), needs_reference=True)
    prepared = learner.prepare(scored, LossScales(kl_coef=KL_COEF))
    metrics = {**prepared.metrics, **learner.commit()}
    return {
        "weights": torch.cat(
            [full_tensor(p).detach().flatten() for p in learner._trained.values()]
        ),
        "metrics": metrics,
        "record": prepared.record,
        "update_kl": learner.update_kl(scored, prepared.record),
        "sound": learner.all_finite(),
    }


def main(rank: int, size: int, folder: Path) -> None:
    """Do everything that is compared, and write it down."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    told: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for kind in (*KINDS, *GRADIENT_ONLY):
        learner = sharded(kind, "unbiased")
        for estimator in estimators_of(kind):
            tensors[f"{kind} {estimator} gradient"] = gradient_of(learner, estimator)
        for estimator in () if kind in GRADIENT_ONLY else WHOLE:
            learner = sharded(kind, estimator)
            told[f"{kind} {estimator}"] = _whole(learner, folder / f"{kind} {estimator}", tensors)
    if rank == 0:
        save_file({k: v.clone() for k, v in tensors.items()}, folder / "told.safetensors")
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _whole(learner: FsdpLearner, place: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Ask, make a step, save, go on, go back and go on again."""
    asked = learner.probe(batch(), kl_coef=KL_COEF)
    done = first_step(learner)
    for column in ("logp", "logp_old", "logp_ref", "kl_exact", "entropy"):
        tensors[f"{place.name} {column}"] = torch.from_numpy(getattr(done["record"], column))
    tensors[f"{place.name} weights"] = done["weights"]
    place.mkdir(exist_ok=True)
    state = learner.save(place)
    published = learner.publish().fingerprint
    scored = learner.score(batch(), needs_reference=True)
    logp = learner.rescore(scored)
    after = first_step(learner)
    tensors[f"{place.name} next weights"] = after["weights"]
    # a rollback right after the new weights were gathered: none of them may be left
    with torch.no_grad():
        learner.scorer.hidden(scored.batches[0].layout)
    learner.load(place, state)
    assert torch.equal(learner.rescore(scored), logp)
    assert torch.equal(first_step(learner)["weights"], after["weights"])
    return {
        "metrics": done["metrics"],
        "update_kl": done["update_kl"],
        "sound": done["sound"],
        "answers": asked,
        "published": published,
        "facts": dict(done["record"].facts),
        "state": state,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
