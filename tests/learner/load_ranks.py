"""What each process of `test_shard_loading.py` does: load by shard, and compare with a whole load.

python load_ranks.py RANK SIZE FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from klinic.model.equivalence import probe_layout
from klinic.model.loading import load_policy, load_scorer
from klinic.model.start_digests import StartDigests
from klinic.model.weights import digest, full_tensor
from klinic.recipe.loading import from_keywords
from klinic.training import learner_processes
from klinic.training.build import start_reference


def refuse_whole_load(*_: Any, **__: Any) -> None:
    raise AssertionError("the model was loaded whole")


def compare_load(settings: dict[str, Any], *, is_whole: bool) -> None:
    """Load a recipe's learner, and assert that its weights are those of a process alone."""
    recipe = from_keywords(task="arithmetic", kl_coef=0.1, **settings).recipe
    section = recipe.model
    if not is_whole:
        learner_processes.load_policy = learner_processes.load_scorer = refuse_whole_load
    learner, digests, _ = learner_processes.build_sharded_learner(recipe, section.name)
    learner_processes.load_policy, learner_processes.load_scorer = load_policy, load_scorer
    alone = load_policy(section, temperature=1.0, seed=recipe.seed)
    reference = start_reference(recipe, alone, section.name, StartDigests(alone.lm))
    assert reference is not None
    assert learner.reference is not None
    assert learner.reference.kind == reference.kind
    compare_weights(learner.policy.lm, alone.lm)
    compare_weights(learner.reference.scorer.lm, reference.scorer.lm)
    assert digest(learner.policy.lm.state_dict()) == digest(alone.lm.state_dict())
    own_digests = StartDigests(alone.lm)
    assert (digests.policy, digests.base) == (own_digests.policy, own_digests.base)
    assert learner.policy.eos_ids == alone.eos_ids
    layout = probe_layout(alone.lm, torch.device("cpu"))
    with torch.no_grad():
        for ours, theirs in (
            (learner.scorer(layout), alone.scorer(layout)),
            (learner.reference.scorer(layout), reference.scorer(layout)),
        ):
            assert torch.equal(ours.logp, theirs.logp)


def compare_weights(sharded: Any, whole: Any) -> None:
    ours, theirs = (dict(lm.named_parameters(remove_duplicate=False)) for lm in (sharded, whole))
    assert list(ours) == list(theirs)
    first_names: dict[int, str] = {}
    for name, p in theirs.items():
        gathered = full_tensor(ours[name])
        assert torch.equal(gathered, p), name
        assert (gathered.dtype, ours[name].requires_grad) == (p.dtype, p.requires_grad), name
        first = first_names.setdefault(id(p), name)
        assert ours[name] is ours[first], f"{name} is no longer tied to {first}"
    buffers = dict(whole.named_buffers())
    for name, buffer in sharded.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def main(rank: int, size: int, folder: Path) -> None:
    """Compare every case of a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            compare_load(case["settings"], is_whole=case["is_whole"])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
