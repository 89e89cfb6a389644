"""Commands of klinic on a device that computes real numbers: as on the CPU, and nothing mixed."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from klinic.evidence.store import complete_steps, read_record
from run_differences import evidence_differences

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="compiled with g++"),
]
STANDIN = Path(__file__).parent / "standin"
ARITHMETIC = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
RECIPE = """
model: {name: tiny}
data: {path: rows.jsonl}
rewards: ["rewards.py:length"]
kl: {coef: 0.05}
loop: {max_steps: 4, prompts_per_step: 2, group_size: 4, checkpoint_every: 2, eval_prompts: 2}
sampling: {max_new_tokens: 8, top_p: 0.95}
learner: {learning_rate: 1.0e-3, micro_batch_size: 3}
eval: {path: rows.jsonl}
output: {trackers: []}
"""
REWARD = """
def length(prompts, completions, **_):
    return [float(len(c)) for c in completions]
"""


def environment(*, standin):
    env = {**os.environ, "KLINIC_SUPERVISED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**env, "PYTHONPATH": str(STANDIN)} if standin else env


def command(*arguments):
    return [sys.executable, "-c", "from klinic.cli import main; main()", *arguments]


def klinic(*arguments, cwd, standin=True):
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(standin=standin),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done


def python(code, tmp_path):
    command = [sys.executable, "-c", code]
    env = environment(standin=True)
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standin")
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [{"prompt": text} for text in ("12+7=", "copy abc", "3-1=", "reverse xyz", "9+9=")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARD)
    return folder


def metrics(run_folder):
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time")} for line in lines
    ]


SETTINGS = {"full": [], "lora": ["model.lora_rank=4"], "bf16": ["model.dtype=bf16"]}
FORWARD = ("loss", "logp", "kl", "kl_k1/mean", "entropy", "reward")


# each takes as long as all weights do; test_fake_cuda.py runs adapters in CI
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lora", "bf16")]


@pytest.mark.parametrize("name", ["full", *SLOW])
def test_the_first_step_is_that_of_the_cpu_bit_by_bit(folder, name):
    for device in ("cpu", "standin"):
        done = klinic(
            *("train", "recipe.yaml", f"output.dir={name}-{device}", *SETTINGS[name]),
            cwd=folder,
            standin=device == "standin",
        )
        assert f"Device: {device}" in done.stdout
    cpu, standin = (metrics(folder / f"{name}-{device}") for device in ("cpu", "standin"))
    (one,), (other,) = ([e for e in side if e.get("step") == 1] for side in (cpu, standin))
    assert one["grad_norm"] > 0
    if name == "bf16":  # the backward pass rounds in another order
        assert [one[key] for key in FORWARD] == [other[key] for key in FORWARD]
        return
    assert one == other
    for a, b in zip(cpu, standin, strict=True):
        shared = [key for key in FORWARD if key in a]
        assert [b[key] for key in shared] == pytest.approx([a[key] for key in shared], rel=1e-4)


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    warm = [f"warm_start.{key}" for key in ("steps=150", "batch_size=32", "learning_rate=3e-3")]
    arguments = ("loop.max_steps=1", "loop.eval_prompts=8", "output.dir=out", *warm)
    klinic("train", str(ARITHMETIC), *arguments, cwd=folder, standin=False)
    return folder / "out" / "start"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", [[], ["model.lora_rank=8", "learner.learning_rate=1e-3"]])
def test_twenty_steps_are_those_of_the_cpu(warm_start, adapter, tmp_path):
    """Tokens are the same; log-probs, KL and loss differ in their last digits."""
    overrides = (f"model.name={warm_start}", "loop.max_steps=20", "loop.eval_every=0", *adapter)
    for device in ("cpu", "standin"):
        arguments = ("train", str(ARITHMETIC), "warm_start=null", f"output.dir={device}")
        klinic(*arguments, *overrides, cwd=tmp_path, standin=device == "standin")
    for step in complete_steps(tmp_path / "cpu"):
        one, other = (read_record(tmp_path / device, step) for device in ("cpu", "standin"))
        assert (one.token_ids == other.token_ids).all()
        tolerance = 0.0 if step == 1 else 1e-5
        for column in ("logp", "logp_old", "logp_ref", "logp_sampler"):
            apart = np.abs(getattr(one, column) - getattr(other, column))[one.loss_mask]
            assert apart.max() <= tolerance, (step, column)
        assert other.facts["loss"] == pytest.approx(one.facts["loss"], abs=tolerance)
    for one, other in zip(*(metrics(tmp_path / d) for d in ("cpu", "standin")), strict=True):
        for key in ("kl", "kl_loss", "reward"):
            assert other.get(key) == pytest.approx(one.get(key), abs=1e-5), key


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(folder):
    whole, killed = (
        shutil.copytree(folder, folder.parent / name, ignore=shutil.ignore_patterns("*-*"))
        for name in ("whole", "killed")
    )
    arguments = ("train", "recipe.yaml", "output.dir=out")
    klinic(*arguments, cwd=whole)
    process = subprocess.Popen(
        command(*arguments), cwd=killed, env=environment(standin=True), stdout=subprocess.DEVNULL
    )
    while not (killed / "out" / "checkpoints" / "step=000002").is_dir():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    klinic(*arguments, "--resume", cwd=killed)
    differ = evidence_differences(whole / "out", killed / "out")
    assert [name for name in differ if not name.startswith("events")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "full-standin", "--run-code"),
        ("diagnose", "full-standin", "--prove", "--run-code"),
        ("check", "recipe.yaml", "--device", "auto"),
        ("export", "lora-standin", "--to", "exported"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_that_loads_a_model_works_there(folder, arguments):
    for name in ("full", "lora"):
        if not (folder / f"{name}-standin").is_dir():
            klinic(
                "train", "recipe.yaml", f"output.dir={name}-standin", *SETTINGS[name], cwd=folder
            )
    done = klinic(*arguments, cwd=folder)
    assert done.returncode == 0 or arguments[0] == "diagnose", done.stderr


def test_the_device_refuses_what_a_gpu_refuses(tmp_path):
    code = """
import torch
torch.use_deterministic_algorithms(True)
x = torch.ones(2, 3).to("standin")
def refused(work):
    try:
        work()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "done"
print(refused(lambda: x + torch.ones(2, 3)))
print(refused(lambda: x.cumsum(-1)))
print(refused(lambda: x.numpy()))
print(refused(lambda: x[torch.tensor([0])] + 1))
weight = torch.nn.Parameter(x)
optimizer = torch.optim.AdamW([weight], fused=True)
weight.sum().backward()
optimizer.step()
optimizer.state[weight]["step"] = optimizer.state[weight]["step"].cpu()
print(refused(optimizer.step))
"""
    printed = python(code, tmp_path).splitlines()
    assert "same device" in printed[0]
    assert "deterministic" in printed[1]
    assert "numpy" in printed[2]
    assert printed[3] == "done"
    assert "same device" in printed[4]


def run_script(name, *arguments, cwd):
    tests = Path(__file__).parents[1]
    env = environment(standin=True)
    env["PYTHONPATH"] += f"{os.pathsep}{tests}"
    done = subprocess.run(
        [sys.executable, str(tests / "accelerator" / name), *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ESTIMATORS = ("unbiased", "sequence", "k1_reward")  # test_fake_cuda.py has all
WAITS_PER_STEP = 6


def test_the_host_waits_for_the_device_six_times_a_step(tmp_path):
    """Besides, transformers reads a number in every pass, of policy and reference."""
    for estimator, counted in run_script("count_waits.py", *ESTIMATORS, cwd=tmp_path).items():
        assert sum(counted["own"].values()) <= WAITS_PER_STEP, (estimator, counted["own"])
        passes = 3 if estimator == "sequence" else 2  # it scores the old policy too
        assert sum(counted["of_libraries"].values()) <= passes * counted["batches"], estimator
        assert counted["kernels"] > 100


def test_the_self_test_finds_what_a_device_computes_wrongly(tmp_path):
    found = run_script("device_faults.py", cwd=tmp_path)
    plain, forgetful, reading = (
        found.pop(f"update, {name}")
        for name in ("nullcontext", "a_resume_without_moments", "a_read_in_every_chunk")
    )
    (healthy, text), *faults = found.values()
    assert healthy, text
    assert len(faults) == 5
    for ok, text in faults:
        assert not ok, text
    assert {name: ok for name, (ok, _) in plain.items()} == {
        "host waits": True,
        "save and resume": True,
    }
    assert "tensors differ" in forgetful["save and resume"][1]
    assert not forgetful["save and resume"][0]
    assert reading["save and resume"][0]
    assert not reading["host waits"][0]


@pytest.mark.slow
def test_the_whole_self_test_finds_each_fault_and_passes_without(folder):
    found = run_script("device_faults.py", str(folder / "recipe.yaml"), cwd=folder)
    healthy = found.pop("nullcontext")
    assert all(ok for ok, _ in healthy.values()), healthy
    assert "MB measured, 1,024.0 MB predicted" in healthy["peak memory"][1]
    for fault, results in found.items():
        assert not results["device"][0], (fault, results)


def test_a_device_that_is_not_there_is_refused_with_what_is(tmp_path):
    code = """
from klinic.errors import ConfigError
from klinic.model.device import resolve_device, unused_accelerator
import torch
print(resolve_device("auto"), resolve_device("cpu"))
for name in ("cuda", "cuda:3", "mps"):
    try:
        resolve_device(name)
    except ConfigError as error:
        print(error)
print(unused_accelerator(torch.device("cpu")), unused_accelerator(torch.device("standin")))
"""
    auto, *refused, unused = python(code, tmp_path).splitlines()
    assert auto == "standin cpu"
    assert all("a device of type standin" in line for line in refused[:2])
    assert "has no float64" in refused[2]
    assert unused == "standin None"


def test_the_cpu_is_used_where_the_recipe_says_so(folder):
    done = klinic(
        *("train", "recipe.yaml", "output.dir=on-cpu", "--use-cpu", "loop.max_steps=1"), cwd=folder
    )
    assert "Device: cpu, fp32, attention sdpa" in done.stdout
    assert "A device of type standin is not used: model.device is cpu." in done.stdout
