"""Two processes with half of the weights each do what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rpc_ranks import (
    GRADIENT_ONLY,
    KINDS,
    KL_COEF,
    MICRO,
    ROUNDED,
    WHOLE,
    batch,
    estimators_of,
    first_step,
    gradient_of,
    policy_of,
    wound_up,
)
from safetensors.torch import load_file

from klinic.learner.checkpoint import MODEL_DIR, SHARDS_DIR
from klinic.learner.packing import gather_tokens, make_micro_batches, split_rows
from klinic.learner.row_shares import share_of_rank
from klinic.model.weights import fingerprint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
CASES = [(kind, estimator) for kind in KINDS for estimator in WHOLE]
AT_WORK = Path(__file__).parent / "rpc_ranks.py"


def run_ranks(folder: Path, size: int) -> None:
    commands = [
        [sys.executable, str(AT_WORK), str(rank), str(size), str(folder)] for rank in range(size)
    ]
    path = os.pathsep.join(sys.path)
    started = [
        subprocess.Popen(
            c, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        for c in commands
    ]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0] * size, "\n".join(errors)[-3000:]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_ranks(folder, 2)
    return (
        folder,
        json.loads((folder / "told.json").read_text()),
        load_file(folder / "told.safetensors"),
    )


CLOSE = {"single": 1e-6, **dict.fromkeys(ROUNDED, 1e-6)}


@pytest.mark.parametrize("kind", [*KINDS, *GRADIENT_ONLY])
def test_two_processes_have_the_gradient_of_one(two, kind):
    alone = wound_up(kind, "unbiased")
    for estimator in estimators_of(kind):
        found, expected = two[2][f"{kind} {estimator} gradient"], gradient_of(alone, estimator)
        assert expected.norm() > 1e-3
        apart = float((found - expected).norm() / expected.norm())
        assert apart < CLOSE.get(kind, 1e-12), estimator
        assert found.dtype == expected.dtype


@pytest.mark.parametrize(("kind", "estimator"), CASES)
def test_two_processes_make_the_step_of_one(two, kind, estimator):
    _, told, tensors = two
    name = f"{kind} {estimator}"
    close = 1e-6 if kind == "single" else 1e-12
    alone = first_step(wound_up(kind, estimator))
    # AdamW's first steps are signs: where a gradient is nearly 0, rounding decides
    assert float((tensors[f"{name} weights"] - alone["weights"]).abs().mean()) < 1e2 * close
    for column in ("logp", "logp_old", "logp_ref", "kl_exact", "entropy"):
        one, other = tensors[f"{name} {column}"], torch.from_numpy(getattr(alone["record"], column))
        assert torch.allclose(one, other, rtol=0, atol=10 * close, equal_nan=True)
    assert told[name]["metrics"] == pytest.approx(alone["metrics"], rel=1e3 * close, abs=close)
    assert told[name]["update_kl"] == pytest.approx(alone["update_kl"], rel=1e4 * close)
    assert told[name]["sound"] == {"weights": True, "optimizer": True}
    for fact, value in alone["record"].facts.items():
        same = value if isinstance(value, str) else pytest.approx(value, rel=1e3 * close)
        assert told[name]["facts"][fact] == same


@pytest.mark.parametrize(("kind", "estimator"), CASES)
def test_two_processes_answer_questions_as_one(two, kind, estimator):
    told = two[1][f"{kind} {estimator}"]["answers"]
    expected = wound_up(kind, estimator).probe(batch(), kl_coef=KL_COEF)
    assert told.keys() == expected.keys()
    close = 1e-4 if kind == "single" else 1e-6
    for name, answer in expected.items():
        for part, value in answer.items():
            number = isinstance(value, float)
            same = pytest.approx(value, rel=close, abs=1e-2 * close) if number else value
            assert told[name][part] == same, (name, part)


@pytest.mark.parametrize(("kind", "estimator"), CASES)
def test_what_two_processes_saved_one_goes_on_with(two, kind, estimator):
    folder, told, tensors = two
    name = f"{kind} {estimator}"
    learner = wound_up(kind, estimator)
    learner.load(folder / name, told[name]["state"])
    trained = torch.cat([p.detach().flatten() for p in learner._trained.values()])
    assert torch.equal(trained, tensors[f"{name} weights"])
    found = first_step(learner)
    close = 1e-4 if kind == "single" else 1e-9
    assert float((found["weights"] - tensors[f"{name} next weights"]).abs().mean()) < close
    files = sorted(path.suffix for path in (folder / name / SHARDS_DIR).iterdir())
    assert files == [".safetensors", ".safetensors"]
    assert any((folder / name / MODEL_DIR).glob("*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_weights_are_published(two, kind):
    _, told, tensors = two
    name = f"{kind} unbiased"
    policy = policy_of(kind)
    start, trained = fingerprint(policy.lm), [p for p in policy.lm.parameters() if p.requires_grad]
    sizes = [p.numel() for p in trained]
    with torch.no_grad():
        for p, values in zip(trained, tensors[f"{name} weights"].split(sizes), strict=True):
            p.copy_(values.reshape(p.shape))
    assert told[name]["published"] == fingerprint(policy.lm) != start


class Member:
    """One of several processes, without the processes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.given: list[torch.Tensor] = []

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.given.append(values)
        return values

    all_reduce_max = all_reduce_sum


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 20])
@pytest.mark.parametrize("micro", [1, MICRO, 16, 100])
def test_every_row_is_one_process_s_and_all_run_equally_many(size, micro):
    record = batch()
    values = torch.arange(record.num_tokens, dtype=torch.float64) + 1
    runs, rows, trained, total = set(), [], [], torch.zeros_like(values)
    for rank in range(size):
        team = Member(rank, size)
        batches = make_micro_batches(
            record, size=micro, pad_id=0, device=torch.device("cpu"), group=team
        )
        runs.add(len(batches))
        share = share_of_rank(
            record, split_rows(record, size=micro, num_ranks=size), rank=rank, num_ranks=size
        )
        rows += share.rows.tolist()
        assert [
            (share.rows[own].tolist() if len(share.rows) else [], counts)
            for own, counts in share.row_sets()
            if counts
        ] == [(b.rows.tolist(), True) for b in batches if b.is_counted]
        assert len(share.row_sets()) == len(batches)
        trained += [row for b in batches if b.is_counted for row in b.rows]
        parts = [values[b.tokens] for b in batches]
        total += gather_tokens(parts, batches, record.num_tokens, team)
    assert len(runs) == 1
    assert sorted(rows) == sorted(trained) == list(range(record.num_rows))
    assert torch.equal(total, values)
