"""klinic attached to TRL in two processes: DDP and FSDP2 on CPUs, started by torchrun.

One launch per layout trains all its cases: most of a launch is the import of TRL.
"""

import json

import numpy as np
import pytest

pytest.importorskip("trl")

from integrations.trl_launch import MANY, launch
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SPANNING = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}  # groups of 4
KL = {"coef": 0.01, "estimator": "unbiased", "controller": "log_pi", "target": 0.05}
CASES = {
    "groups that span ranks": {"settings": SPANNING},
    "adapter without a KL": {"peft": True, "settings": {**SPANNING, "beta": 0.0, "max_steps": 2}},
    "healthy": {"ways": ["attached"], "settings": MANY},
    "cold on one": {"ways": ["attached"], "fault": "temperature on one", "settings": MANY},
    "reference on one": {"ways": ["attached"], "fault": "reference on one", "settings": MANY},
}
OF_DDP = {
    "klinic's KL": {"ways": ["attached"], "settings": SPANNING, "options": {"kl": KL}},
    "advantages on one": {"ways": ["attached"], "fault": "advantages on one", "settings": MANY},
    "gradients stay": {"ways": ["attached"], "fault": "no sync", "settings": MANY},
}


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def launched(request, taught, tmp_path_factory):
    """The layout, the folder of its runs, and the results."""
    folder = tmp_path_factory.mktemp(request.param)
    is_ddp = request.param == "ddp"
    cases = CASES | OF_DDP if is_ddp else CASES
    return request.param, folder, launch(folder, taught, cases, request.param)


def run_of(launched, case):
    return launched[1] / case / "attached" / "run"


@pytest.mark.parametrize("case", ["groups that span ranks", "adapter without a KL"])
def test_training_is_the_same_to_the_last_bit(launched, case):
    layout, _, results = launched
    digests = {
        (way, rank): found["digest"]
        for way, ranks in results[case].items()
        for rank, found in enumerate(ranks)
    }
    assert len(set(digests.values())) == 1, digests
    assert results[case]["plain"][0]["kind"].endswith("FSDP" if layout == "fsdp2" else "MULTI_CPU")


def test_the_rows_of_both_ranks_are_one_record(launched):
    run = run_of(launched, "groups that span ranks")
    logs = launched[2]["groups that span ranks"]["attached"][0]["logs"]
    assert store.complete_steps(run) == [1, 2, 3]
    for step, log in enumerate(logs, start=1):
        record = store.read_record(run, step)
        assert record.process.tolist() == [0] * 6 + [1] * 6
        assert record.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert record.sample.tolist() == [0, 1, 2, 3] * 3
        assert float(record.reward.mean()) == pytest.approx(log["reward"], abs=1e-5)
        assert record.facts["loss"] == pytest.approx(log["loss"], abs=2e-5)
        assert record.facts["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert record.facts["num_rank_weights"] == 1
        for group in range(3):
            assert abs(float(record.advantage[record.group == group].sum())) < 1e-4
        np.testing.assert_allclose(record.logp_sampler, record.logp, atol=5e-5)


def test_probes_ran_on_all_ranks(launched):
    lines = (run_of(launched, "healthy") / "probes.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    found = {entry["probe"] for entry in results if entry["step"] == 1}
    assert {"rescore", "rescore_alone", "kl_gradient", "micro_batches"} <= found
    assert all(entry["process"] in (0, 1) for entry in results)
    events = (run_of(launched, "healthy") / "events.jsonl").read_text()
    assert "probe failed" not in events
    assert "The KL is exactly 0 on" in events


def test_a_healthy_run_has_no_failed_check(launched):
    diagnosis = diagnose(read_cases(run_of(launched, "healthy")), CHECKS)
    assert not diagnosis.sick, diagnosis.headline


def test_a_temperature_of_one_rank_is_named(launched):
    said = launched[2]["cold on one"]["attached"][0]["said"]
    diagnosis = diagnose(read_cases(run_of(launched, "cold on one")), CHECKS)
    assert diagnosis.cause in {"temperature-on-one-side", "hidden-sampling-transform"}, said
    assert "process 1 of 2" in diagnosis.causes[0].summary


def test_a_reference_of_one_rank_is_named(launched):
    diagnosis = diagnose(read_cases(run_of(launched, "reference on one")), CHECKS)
    assert diagnosis.cause == "wrong-reference", diagnosis.headline


def test_faults_of_gradients_and_advantages_are_named(launched):
    layout, *_ = launched
    if layout == "ddp":  # shards have no copies that could
        causes = {
            name: diagnose(read_cases(run_of(launched, name)), CHECKS).cause
            for name in ("gradients stay", "advantages on one")
        }
        assert causes == {"gradients stay": "ranks-diverge", "advantages on one": "wrong-groups"}


def test_all_ranks_use_the_same_coefficient(launched):
    layout, _, results = launched
    if layout == "ddp":
        one, other = results["klinic's KL"]["attached"]
        assert one["digest"] == other["digest"]
        assert store.complete_steps(run_of(launched, "klinic's KL")) == [1, 2, 3]
