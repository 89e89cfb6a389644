"""What `klinic.attach` costs a step of TRL: seconds with it over seconds without, interleaved.

    python -m bench.attach_overhead [--blocks 6] [--steps 4] [--json]

One process, one trainer, a Qwen3 of 10 million random weights on klinic's tokenizer. Blocks of
steps come in the order A B B A: A without klinic, B attached, and the same with A for B as control.
Questions are asked after 1, 2, 4, 8, ... steps and cost a long run nothing; `doctor="none"` leaves
them out, and so is what is timed: recording. Ratios of medians; a busy machine makes them noise,
and the control says how much.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import klinic

MUST = 1.01
PROMPTS = [f"{a}+{b}=" for a in range(10, 20) for b in range(10, 20)]


def trainer_of(folder: Path) -> Any:
    """Return a trainer of 10 million weights that would train for ever."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from klinic.model.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=320,
        intermediate_size=1280,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GRPOTrainer(
        Qwen3ForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=32,
            max_steps=1,
            learning_rate=1e-6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )


def block(trainer: Any, folder: Path, *, attached: bool, steps: int) -> float:
    """Return the seconds of a step, the start of training apart."""
    trainer.args.max_steps = steps + 1  # the first one is not timed
    handle = None
    if attached:
        console = Console(file=io.StringIO())
        handle = klinic.attach(trainer, folder, doctor="none", console=console)
    clock = _Clock()
    trainer.add_callback(clock)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    trainer.remove_callback(clock)
    if handle is not None:
        handle.detach()
    return (clock.ends[-1] - clock.ends[0]) / steps


class _Clock:
    """When steps end; a callback that answers to every event."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return self._step if name == "on_step_end" else self._nothing

    def _step(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def _nothing(self, *_: Any, **__: Any) -> None:
        return


def measured(blocks: int, steps: int) -> dict[str, Any]:
    """Return both ratios, and what they are of."""
    seconds: dict[str, list[float]] = {"A": [], "B": [], "A1": [], "A2": []}
    with tempfile.TemporaryDirectory() as temporary:
        trainer = trainer_of(Path(temporary) / "out")
        block(trainer, Path(temporary) / "warm", attached=False, steps=steps)
        for number in range(blocks):
            for place, name in enumerate(("A", "B", "B", "A", "A1", "A2", "A2", "A1")):
                run = Path(temporary) / f"{number}-{place}"
                taken = block(trainer, run, attached=name == "B", steps=steps)
                seconds[name].append(taken)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["B"] / median["A"]
    return {
        "attach_overhead": {
            "median": ratio,
            "low": min(seconds["B"]) / min(seconds["A"]),
            "high": max(seconds["B"]) / max(seconds["A"]),
            "must": MUST,
            "ok": ratio <= MUST,
            "aa": median["A2"] / median["A1"],
            "seconds": median["A"],
        }
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ratios = measured(given.blocks, given.steps)
    if given.json:
        print(json.dumps({"ratios": ratios}))  # noqa: T201
        return
    for name, found in ratios.items():
        print(  # noqa: T201
            f"{name}: {found['median']:.3f} (must be at most {found['must']}; A/A control "
            f"{found['aa']:.3f}; a step without: {found['seconds']:.2f} s)"
        )


if __name__ == "__main__":
    main()
