"""Faults in a real language model: LoRA in bf16. `python -m bench.real_model MODEL [CAUSE ...]`."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from klinic.faults import FAULTS
from klinic.faults.base import Fault
from klinic.lab.scoreboard_outcome import diagnose_run
from klinic.lab.scoreboard_run import train_trial

CAUSES = (
    *("temperature-on-one-side", "misaligned-logp", "wrong-loss-mask", "kl-gradient-wrong"),
    *("hidden-sampling-transform", "advantage-explodes", "wrong-groups", "loss-scaled-wrong"),
    *("layout-changes-logp", "prompt-mismatch", "broken-sampler"),
)
"""Those that show before the first update: a step of this model takes a minute on a CPU."""
SETTINGS = {
    "warm_start": None,
    "rewards": [f"{__file__}:digits"],  # the task's own would be that of noise for all
    "model.lora_rank": 8,
    "model.dtype": "bf16",
    "learner.learning_rate": 1e-3,
    "learner.micro_batch_size": 4,
    "loop.max_steps": 1,
    "loop.prompts_per_step": 2,
    "loop.group_size": 4,
    "loop.eval_prompts": 1,
    "sampling.max_new_tokens": 8,
}


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:  # noqa: ARG001
    """Return the share of digits, and a little for the length: hardly any two are equal."""
    return [
        sum(c.isdigit() for c in text) / max(len(text), 1) + len(text) / 100 for text in completions
    ]


def main() -> None:
    """Inject each fault, and a run without any, and print what the doctor says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("causes", nargs="*", default=["", *CAUSES])
    given = parser.parse_args()
    faults: dict[str, Fault | None] = {"": None, **{fault.cause: fault for fault in FAULTS}}
    for cause in given.causes:
        began = time.monotonic()
        fault = faults[cause]
        own = {} if fault is None else {**fault.settings}
        own.pop("learner.micro_batch_size", None)
        with tempfile.TemporaryDirectory() as folder:
            run = train_trial(
                Path(folder) / "run", fault, **{**SETTINGS, "model": given.model, **own}
            )
            found, failed = diagnose_run(run)
        outcome = {
            "injected": cause or None,
            "named": found.cause,
            "failed": failed,
            "first_step": found.first_step,
            "seconds": round(time.monotonic() - began),
        }
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
