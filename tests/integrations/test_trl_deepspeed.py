"""klinic attached to TRL under DeepSpeed's ZeRO-2 and ZeRO-3, in two processes on CPUs.

DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target FOLDER deepspeed==0.19.8
pip install --target FOLDER --no-deps hjson ninja py-cpuinfo msgpack einops
KLINIC_DEEPSPEED=FOLDER pytest -m slow -s tests/integrations/test_trl_deepspeed.py
"""

import json
import sys

import pytest

pytest.importorskip("trl")

from integrations.trl_launch import DEEPSPEED, MANY, count_named, launch, launch_faults
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not DEEPSPEED, reason="KLINIC_DEEPSPEED names no folder with deepspeed"),
]
SPANNING = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}  # groups of 4
ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
CASES = {
    "groups that span ranks": {"settings": SPANNING},
    "accumulated": {"settings": ACCUMULATED},
    "adapter without a KL": {"peft": True, "settings": {**SPANNING, "beta": 0.0}},
    "healthy": {"ways": ["attached"], "settings": MANY},
}


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def launched(request, taught, tmp_path_factory):
    """The layout, the folder of its runs, and the results."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, launch(folder, taught, CASES, request.param)


def run_of(launched, case):
    return launched[1] / case / "attached" / "run"


@pytest.mark.parametrize("case", [name for name in CASES if name != "healthy"])
def test_training_is_the_same_to_the_last_bit(launched, case):
    results = launched[2][case]
    digests = {found["digest"] for ranks in results.values() for found in ranks}
    assert len(digests) == 1, results
    assert results["plain"][0]["kind"].endswith("DEEPSPEED")


@pytest.mark.parametrize("case", CASES)
def test_a_healthy_run_has_no_failed_check(launched, case):
    diagnosis = diagnose(read_cases(run_of(launched, case)), CHECKS)
    assert not diagnosis.sick, diagnosis.headline
    assert store.complete_steps(run_of(launched, case)) == [1, 2, 3]


def test_weights_are_identified_and_seen_to_move(launched):
    run = run_of(launched, "healthy")
    facts = [store.read_record(run, step).facts for step in (1, 2, 3)]
    assert len({fact["weights_published"] for fact in facts}) == 3
    assert {fact["num_rank_weights"] for fact in facts} == {1}
    assert facts[0]["unchanged_share"] < 0.5
    assert all(fact["grad_norm"] > 0 for fact in facts)
    policy = json.loads((run / "run.json").read_text())["policy"]
    assert policy["num_parameters"] == policy["num_trainable"] > 1000


def test_probes_of_the_gradient_run_or_are_said_missing(launched):
    run = run_of(launched, "healthy")
    lines = (run / "probes.jsonl").read_text().splitlines()
    names = {json.loads(line)["probe"] for line in lines}
    events = (run / "events.jsonl").read_text()
    assert "probe failed" not in events
    assert "The KL is exactly 0 on" in events
    if launched[0] == "zero2":
        assert {"rescore", "rescore_alone", "kl_gradient", "micro_batches"} <= names
    else:
        assert names == {"rescore", "rescore_alone"}
        assert "the probes of the gradient do not run" in events


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_eight_of_twelve_faults_are_named_and_none_wrongly(layout, taught, tmp_path):
    causes = launch_faults(tmp_path, taught, layout)
    sys.stdout.write(f"{layout}: {causes}\n")
    num_named, wrong = count_named(causes)
    assert not wrong, wrong
    assert num_named >= 8, causes
