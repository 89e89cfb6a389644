"""`python -m bench.poisoned_batch --out DIR`: is a poisoned batch found in real training?

    python -m bench.poisoned_batch --out runs/poisoned

The arithmetic recipe, 60 steps, with limits on gradient norm and reward. The batch of step 40 is
poisoned: its rewards are a million times too large, or it is one prompt eight times with rewards
turned round. The second is tried with many prompts, since what it can do depends on the prompt:
where all completions are right, or all wrong, there is nothing to turn round. The table says which
were left out, and how accurate the policy is 20 steps later.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import RECIPE, column, markdown
from klinic.evidence.files import Journal
from klinic.evidence.rollout import Prompt, Rollout
from klinic.evidence.run_facts import EVENTS
from klinic.recipe.loading import load_recipe
from klinic.rewards.scores import StepRewards
from klinic.training.run import Run
from klinic.training.source import PythonInputs
from klinic.training.train import train

PLACE, STEPS, PROMPTS = 40, 60, tuple(range(0, 48, 4))
LIMITS = ("recovery.grad_norm_limit=2", "recovery.reward_drop=0.25")
Turn = Callable[[StepRewards], StepRewards]


class Poisoned:
    """Patches a run: the batch at one place has other prompts, other rewards, or both."""

    def __init__(self, turn: Turn, prompt: int | None) -> None:
        self._turn = turn
        self._prompt = prompt
        self._here = 0
        self._prompts, self._reward = Run.prompt_batch, Run.score_rollouts

    def __enter__(self) -> "Poisoned":
        def prompts(run: Run, position: int) -> list[Prompt]:
            self._here = position
            real = self._prompts(run, position)
            if position != PLACE or self._prompt is None:
                return real
            one = run.parts.prompt_dataset.prompt_at(self._prompt)
            return [replace(one, index=10**6 + number) for number in range(len(real))]

        def reward(run: Run, rollouts: list[Rollout]) -> StepRewards:
            scores = self._reward(run, rollouts)
            return self._turn(scores) if self._here == PLACE else scores

        Run.prompt_batch, Run.score_rollouts = prompts, reward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Run.prompt_batch, Run.score_rollouts = self._prompts, self._reward  # type: ignore[method-assign]


def scaled(scores: StepRewards) -> StepRewards:
    """Return rewards a million times too large."""
    return replace(scores, total=scores.total * 1e6)


def inverted(scores: StepRewards) -> StepRewards:
    """Return rewards turned round."""
    return replace(scores, total=1 - scores.total)


CASES: dict[str, tuple[Turn, int | None]] = {
    "clean": (lambda scores: scores, None),
    "scaled": (scaled, None),
    **{f"inverted, prompt {number}": (inverted, number) for number in PROMPTS},
}


def make(out: Path, name: str) -> Path:
    """Train, unless the run is there."""
    folder = out / name.replace(", ", "-").replace(" ", "-")
    if len(column(folder, "loss")) < STEPS:
        settings = [f"loop.max_steps={STEPS}", "output.trackers=[]", f"output.dir={folder}"]
        loaded = load_recipe(
            RECIPE, [*settings, *LIMITS, "loop.eval_every=0", "loop.eval_prompts=500"]
        )
        with Poisoned(*CASES[name]), (out / f"{folder.name}.log").open("w") as log:
            train(loaded.recipe, name=name, inputs=PythonInputs(), console=Console(file=log))
    return folder


def row(folder: Path, name: str) -> tuple[str, ...]:
    """Return what became of a run."""
    told = [e for e in Journal(folder / EVENTS).entries() if e["event"] == "trouble"]
    here = [e for e in told if PLACE in e["places"]]
    done = here[-1]["act"] if here else "not seen"
    seen = "{kind} {measured:.3g}, limit {limit:.3g}".format(**here[0]) if here else ""
    accuracy = column(folder, "eval/accuracy")[-1]
    return name, done, seen, str(len(told) - len(here)), f"{accuracy:.3f}"


HEAD = ("batch of step 40", "what was done", "seen by", "other alarms", "accuracy at step 60")


def rows(out: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every case, making what is missing."""
    for name in CASES:
        yield row(make(out, name), name)


def main(arguments: list[str]) -> None:
    """Make what is missing and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.poisoned_batch")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    Console(highlight=False, soft_wrap=True).print(markdown(HEAD, list(rows(out))), markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
