"""Starts TRL runs of two processes on CPUs, and the settings of their layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "trl_ranks.py"
MANY = {
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
}
SICK = {  # those of the scoreboard of TRL's faults
    **MANY,
    "learning_rate": 3e-4,
    "max_steps": 6,
    "num_generations": 8,
    "max_completion_length": 8,
    "beta": 0.05,
    "scale_rewards": "none",
    "loss_type": "dr_grpo",
    # of several lengths, so that batches are padded
    "prompts": [f"{a}+{b}=" for a in (2, 3, 14, 15) for b in (4, 5, 16, 17)],
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
DEEPSPEED = os.environ.get("KLINIC_DEEPSPEED", "")  # a folder with deepspeed and what it needs
LAYOUTS = {
    "ddp": {},
    "fsdp2": FSDP,
    "zero2": {"KLINIC_ZERO": "2", "ACCELERATE_USE_DEEPSPEED": "true"},
    "zero3": {"KLINIC_ZERO": "3", "ACCELERATE_USE_DEEPSPEED": "true"},
}


def launch(folder, start, cases, layout):
    """Train the cases in two processes; return the results by case and way, for each rank."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"folder": str(folder), "start": str(start), "cases": cases}))
    extra = [DEEPSPEED] if layout.startswith("zero") else []
    paths = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path, *extra])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPT), str(plan)],
        env=environment | LAYOUTS[layout],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((folder / "results.json").read_text())


FAULT_CAUSES = {
    "temperature": "temperature-on-one-side",
    "temperature on one": "temperature-on-one-side",
    "reference": "wrong-reference",
    "reference on one": "wrong-reference",
    "wrong-groups": "wrong-groups",
    "advantages on one": "wrong-groups",
    "wrong-loss-mask on one": "wrong-loss-mask",
    "misaligned-logp": "misaligned-logp",
    "stop-token-fault": "stop-token-fault",
    "kl-sign-flipped": "kl-sign-flipped",
    "layout-changes-logp": "layout-changes-logp",
    "reward by chance": "broken-reward",
}
"""Twelve faults of `trl_ranks.py`, four of them in one process of two, and their causes."""
FAULT_SETTINGS = {
    # equal completions of a prompt: 15 in 6 steps in groups of 8, too few for three standard errors
    # above half of the variance; 30 in 2 steps in groups of 32
    "reward by chance": {"per_device_train_batch_size": 64, "num_generations": 32},
}


def launch_faults(folder, start, layout):
    """Train with each of the faults; return the cause that the doctor names, by fault."""
    from klinic.checks import CHECKS
    from klinic.doctor.cases import read_cases
    from klinic.doctor.diagnosis import diagnose

    cases = {
        name: {
            "ways": ["attached"],
            "fault": name,
            "settings": SICK | FAULT_SETTINGS.get(name, {}),
        }
        for name in FAULT_CAUSES
    }
    launch(folder, start, cases, layout)
    runs = {name: folder / name / "attached" / "run" for name in FAULT_CAUSES}
    return {name: diagnose(read_cases(run), CHECKS).cause for name, run in runs.items()}


def count_named(causes):
    """Return how many faults are named, and the wrong causes by fault."""
    wrong = {
        name: cause
        for name, cause in causes.items()
        if cause is not None and cause != FAULT_CAUSES[name]
    }
    return sum(cause == FAULT_CAUSES[name] for name, cause in causes.items()), wrong
