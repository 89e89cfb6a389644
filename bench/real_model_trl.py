"""Faults of TRL runs on a real language model, LoRA in bf16.

    python -m bench.real_model_trl MODEL [--only CAUSE ...]

The faults are those of the scoreboard on TRL that show in the first step.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import real_model
from bench.trl_scoreboard import Trial, outcome
from klinic.faults.in_trl import TRL_FAULTS
from klinic.lab.scoreboard_outcome import HEALTHY

CAUSES = (
    *("temperature-on-one-side", "misaligned-logp", "wrong-loss-mask", "kl-gradient-wrong"),
    *("hidden-sampling-transform", "stop-token-fault", "advantage-explodes", "wrong-groups"),
    *("loss-scaled-wrong", "layout-changes-logp", "prompt-mismatch", "broken-sampler"),
    "nan-outside-mask",
)
SETTINGS = {
    "peft": True,
    "bf16": True,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "learning_rate": 1e-3,
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 24,
    "eval_strategy": "no",
}


ROWS = [
    {
        "prompt": [{"role": "user", "content": f"What is {a}+{b}? Say only the number."}],
        "answer": str(a + b),
    }
    for a in range(2, 10)
    for b in range(2, 10)
]


def digits(completions: Any, **_: Any) -> list[float]:
    """Return the share of digits in what was said, and a little for its length."""
    return real_model.digits([], [said[-1]["content"] for said in completions])


def main() -> None:
    """Make a healthy run and one of each fault, and print what the doctor says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="*", default=[HEALTHY, *CAUSES])
    given = parser.parse_args()
    faults = {fault.cause: fault for fault in TRL_FAULTS}
    for cause in given.only:
        fault = faults.get(cause)
        name = "as it is" if fault is None else fault.mechanism
        trial = Trial(
            cause=cause,
            name=name,
            seed=0,
            fault=fault,
            settings=SETTINGS,
            reward=digits,
            rows=ROWS,
        )
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(trial, given.model, Path(folder) / "trial")
        found["seconds"] = round(time.monotonic() - began)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
