"""What two processes do in `test_fsdp.py`: this file is run once for each of them.

python ranks_at_work.py RANK SIZE FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from klinic.learner.fsdp import FsdpLearner, Ranks
from klinic.learner.local import LocalLearner
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.loading import Policy
from klinic.model.reference import Reference, adapter_frozen, adapter_off
from klinic.model.weights import whole
from small import batch_of, drifted_reference, learner_of, rollouts, small_policy

MICRO = 3  # of 8 rows: three micro-batches, and one more that does not count
KL_COEF = 0.3
KINDS = ("full", "lora", "frozen", "checkpointed", "single")
"""`single` is float32; the others are float64, where nothing is lost in rounding."""
ASKED = ("unbiased", "exact")
CASES = [
    *((kind, estimator) for kind in ("full", "lora") for estimator in ESTIMATORS),
    *((kind, estimator) for kind in ("frozen", "checkpointed", "single") for estimator in ASKED),
]


def policy_of(kind: str) -> Policy:
    """Return a policy of one kind, the same in every process."""
    changes: dict[str, Any] = {"gradient_checkpointing": kind == "checkpointed"}
    if kind in ("lora", "frozen"):
        changes |= {"lora_rank": 2}
    policy = small_policy(double=kind != "single", **changes)
    if kind in ("lora", "frozen"):  # matrices that start at 0 have no gradient in the first ones
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(3)
            for name, p in policy.lm.named_parameters():
                if p.requires_grad and (kind == "frozen" or ".lora_A." in name):
                    p.add_(0.1 * torch.randn_like(p))
    return policy


def reference_of(kind: str, policy: Policy) -> Reference:
    """Return a reference that is not where the policy is, of the kind that its policy has."""
    match kind:
        case "lora":
            return adapter_off(policy.scorer, source="small")
        case "frozen":
            reference = adapter_frozen(policy.scorer, source="small")
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


def sharded(kind: str, estimator: str, *, published: bool) -> FsdpLearner:
    """Return this process's part of the same learner."""
    alone = wound_up(kind, estimator)
    return FsdpLearner(
        alone._policy,
        alone._reference,
        objective=alone._objective,
        settings=alone._settings,
        team=Ranks(),
        published=policy_of(kind) if published else None,
    )


def batch(step: int = 11) -> Any:
    """Return the rows of a step at which the KL's share of the gradient is looked at."""
    return batch_of(rollouts(num_prompts=2), step=step)


def first_step(learner: LocalLearner) -> dict[str, Any]:
    """Prepare and commit a step; return all that can be compared."""
    scored = learner.score(batch(), needs_reference=True)
    prepared = learner.prepare(scored, kl_coef=KL_COEF)
    gradient = torch.cat([whole(g).flatten() for g in learner._gradients()])
    metrics = {**prepared.metrics, **learner.commit()}
    return {
        "gradient": gradient,
        "weights": torch.cat([whole(p).detach().flatten() for p in learner._trained.values()]),
        "metrics": metrics,
        "record": prepared.record,
        "update_kl": learner.update_kl(scored, prepared.record),
        "sound": learner.sound(),
    }


def main(rank: int, size: int, folder: Path) -> None:
    """Do everything that is compared, and write it down."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    told: dict[str, Any] = {}
    tensors = {}
    for kind, estimator in CASES:
        learner = sharded(kind, estimator, published=rank == 0)
        asked = learner.probe(batch(), kl_coef=KL_COEF) if estimator in ASKED else {}
        done = first_step(learner)
        name = f"{kind} {estimator}"
        tensors[f"{name} gradient"] = done["gradient"]
        tensors[f"{name} weights"] = done["weights"]
        for column in ("logp", "logp_old", "logp_ref", "kl_exact", "entropy"):
            tensors[f"{name} {column}"] = torch.from_numpy(getattr(done["record"], column))
        told[name] = {
            "metrics": done["metrics"],
            "update_kl": done["update_kl"],
            "sound": done["sound"],
            "answers": asked,
            "published": learner.publish().fingerprint,
            "facts": dict(done["record"].facts),
        }
        if estimator == "unbiased":
            place = folder / kind
            place.mkdir(exist_ok=True)
            told[name]["state"] = learner.save(place)
            after = first_step(learner)
            tensors[f"{name} next weights"] = after["weights"]
            learner.load(place, told[name]["state"])
            again = first_step(learner)
            assert torch.equal(again["weights"], after["weights"])
    if rank == 0:
        save_file({k: v.clone() for k, v in tensors.items()}, folder / "told.safetensors")
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
