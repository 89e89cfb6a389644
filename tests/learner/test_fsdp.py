"""Two processes with half of the weights each do what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_at_work import (
    ASKED,
    CASES,
    KINDS,
    KL_COEF,
    MICRO,
    batch,
    first_step,
    policy_of,
    wound_up,
)
from safetensors.torch import load_file

from klinic.learner.checkpoint import MODEL, SHARDS
from klinic.learner.packing import joined, micro_batches, own_rows
from klinic.model.weights import fingerprint

AT_WORK = Path(__file__).parent / "ranks_at_work.py"


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


@pytest.mark.parametrize(("kind", "estimator"), CASES)
def test_two_processes_have_the_gradient_of_one(two, kind, estimator):
    _, told, tensors = two
    name = f"{kind} {estimator}"
    alone = first_step(wound_up(kind, estimator))
    expected = alone["gradient"]
    found = tensors[f"{name} gradient"]
    assert expected.norm() > 1e-3
    close = 1e-6 if kind == "single" else 1e-12
    assert float((found - expected).norm() / expected.norm()) < close
    assert torch.allclose(tensors[f"{name} weights"], alone["weights"], rtol=0, atol=1e3 * close)
    for column in ("logp", "logp_old", "logp_ref", "kl_exact", "entropy"):
        one, other = tensors[f"{name} {column}"], torch.from_numpy(getattr(alone["record"], column))
        assert torch.allclose(one, other, rtol=0, atol=close, equal_nan=True)
    assert told[name]["metrics"] == pytest.approx(alone["metrics"], rel=1e3 * close, abs=close)
    assert told[name]["update_kl"] == pytest.approx(alone["update_kl"], rel=1e5 * close, abs=close)
    assert told[name]["sound"] == {"weights": True, "optimizer": True}
    facts = told[name]["facts"]
    for fact, value in alone["record"].facts.items():
        assert facts[fact] == (
            value if isinstance(value, str) else pytest.approx(value, rel=1e3 * close)
        )


@pytest.mark.parametrize(("kind", "estimator"), [c for c in CASES if c[1] in ASKED])
def test_two_processes_answer_questions_as_one(two, kind, estimator):
    told = two[1][f"{kind} {estimator}"]["answers"]
    expected = wound_up(kind, estimator).probe(batch(), kl_coef=KL_COEF)
    assert told.keys() == expected.keys()
    for name, answer in expected.items():
        close = 1e-4 if kind == "single" else 1e-6
        assert told[name] == pytest.approx(answer, rel=close, abs=1e-2 * close), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_processes_saved_one_goes_on_with(two, kind):
    folder, told, tensors = two
    name = f"{kind} unbiased"
    learner = wound_up(kind, "unbiased")
    learner.load(folder / kind, told[name]["state"])
    found = first_step(learner)
    close = 1e-3 if kind == "single" else 1e-9
    assert torch.allclose(found["weights"], tensors[f"{name} next weights"], rtol=0, atol=close)
    files = sorted(path.suffix for path in (folder / kind / SHARDS).iterdir())
    assert files == [".safetensors", ".safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_weights_are_published_and_saved(two, kind):
    folder, told, tensors = two
    learner = wound_up(kind, "unbiased")
    first_step(learner)
    trained = torch.cat([p.detach().flatten() for p in learner._trained.values()])
    close = 1e-3 if kind == "single" else 1e-9
    assert torch.allclose(trained, tensors[f"{kind} unbiased weights"], rtol=0, atol=close)
    start = fingerprint(policy_of(kind).lm)
    assert told[f"{kind} unbiased"]["published"] not in ("", start)
    assert any((folder / kind / MODEL).glob("*.safetensors"))


class Member:
    """One of several processes, without the processes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.given: list[torch.Tensor] = []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.given.append(values)
        return values


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 20])
@pytest.mark.parametrize("micro", [1, MICRO, 16, 100])
def test_every_row_is_one_process_s_and_all_run_equally_many(size, micro):
    record = batch()
    values = torch.arange(record.num_tokens, dtype=torch.float64) + 1
    runs, rows, total = set(), [], torch.zeros_like(values)
    for rank in range(size):
        team = Member(rank, size)
        batches = micro_batches(record, size=micro, pad_id=0, device=torch.device("cpu"), team=team)
        runs.add(len(batches))
        own = own_rows(record.num_rows, size=micro, team=team)
        rows += range(record.num_rows)[own]
        counted = [row for b in batches if b.counts for row in range(b.rows.start, b.rows.stop)]
        assert counted == list(range(record.num_rows)[own])
        parts = [values[b.tokens] for b in batches]
        total += joined(parts, batches, record.num_tokens, team)
    assert len(runs) == 1
    assert rows == list(range(record.num_rows))
    assert torch.equal(total, values)
