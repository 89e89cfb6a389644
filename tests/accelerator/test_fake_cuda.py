"""Every part of klinic on a CUDA device without numbers: no mixed devices, few waits, no loops.

The vocabulary has 152,064 tokens. The slow test runs all estimators with all losses, full and LoRA.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="compiled with g++"),
]
HERE = Path(__file__).parent
WAITS_PER_STEP = 6
KERNELS_PER_TOKEN = 0.25  # of one line; a chunk of logits has 176 tokens
KERNELS_PER_BATCH = 1800


def run_steps(what, tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_cuda_steps.py"), what],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return run_steps("short", tmp_path_factory.mktemp("fake"))


def lines_over_limits(step):
    """Return the lines of klinic that wait, if they wait too often, and too many kernels."""
    over = {}
    if sum(step["own"].values()) > WAITS_PER_STEP:
        over |= step["own"]
    # one for each forward pass: policy, reference, and for `sequence` the old policy
    if sum(step["of_libraries"].values()) > 3 * step["batches"]:
        over |= step["of_libraries"]
    if sum(step["kernels"].values()) > KERNELS_PER_BATCH * step["batches"]:
        over["kernels"] = sum(step["kernels"].values())
    return over


def growing_lines(steps):
    """Return the lines whose kernels grow with the tokens of a micro-batch."""
    (few, less), (many, more) = ((int(n) * 4, step["kernels"]) for n, step in steps.items())
    grown = {line: num - less.get(line, 0) for line, num in more.items()}
    limit = KERNELS_PER_TOKEN * (many - few)
    return {line: num for line, num in grown.items() if num > limit and line != "elsewhere"}


def test_each_estimator_waits_six_times_a_step(counted):
    assert len(counted["steps"]) == 14
    assert {name.split(", ")[2] for name in counted["steps"]} == {"full", "LoRA"}
    over = {name: lines_over_limits(step) for name, step in counted["steps"].items()}
    assert not {name: lines for name, lines in over.items() if lines}


def test_no_loss_with_any_estimator_waits(counted):
    assert len(counted["losses"]) > 80
    assert not {name: lines for name, lines in counted["losses"].items() if lines}


def test_no_line_runs_a_kernel_for_every_token(counted):
    assert growing_lines(counted["long"]) == {}


def test_sampling_evaluation_and_probes_run_on_one_device(counted):
    assert counted["parts"].keys() >= {f"{name}, full" for name in ("sampling", "greedy", "probe")}
    assert all(sum(part["kernels"].values()) > 100 for part in counted["parts"].values())


def test_a_loop_a_read_and_a_tensor_on_the_host_are_found_with_their_line(counted):
    assert any(line.startswith("model/scorer.py") for line in growing_lines(counted["loop"]))
    over = lines_over_limits(counted["read"]["88"])
    assert any(line.startswith("model/scorer.py") for line in over)
    assert "same device" in counted["mixed"]


def test_the_head_multiplies_bf16_operands_into_fp32_logits(counted):
    # reference, policy, and the gradient of the hidden states
    assert counted["head"]["num"] >= 3
    assert counted["head"]["dtype"] == "torch.float32"


@pytest.mark.slow
def test_all_estimators_with_all_losses_full_and_lora(tmp_path):
    found = run_steps("matrix", tmp_path)
    assert len(found["steps"]) > 160
    over = {name: lines_over_limits(step) for name, step in found["steps"].items()}
    assert not {name: lines for name, lines in over.items() if lines}
