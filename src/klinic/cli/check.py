"""`klinic check RECIPE`: test every component on one batch before training; exit code for CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json, say
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.cli.train import Overrides
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.probe.single_batch import Checked


Recipe = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.", show_default=False)
]
Trl = Annotated[
    str | None,
    typer.Option(
        "--trl",
        metavar="SCRIPT:FUNCTION",
        help="Check the trl.GRPOTrainer that this function returns, instead of a recipe.",
    ),
]


def check(
    recipe: Recipe = None,
    overrides: Overrides = None,
    trl: Trl = None,
    run_code: RunCode = False,
    as_json: Json = False,
) -> None:
    """Test every component of a recipe on two small batches, with all checks of the first step."""
    from rich.console import Console

    if (recipe is None) == (trl is None):
        raise ConfigError(
            "check needs either a recipe or --trl with a function that returns a trainer: "
            "klinic check recipes/arithmetic.yaml, or klinic check --trl train.py:make_trainer."
        )
    if recipe is not None:
        _refuse_recorded_code(recipe, run_code=run_code)
        found = _checked_recipe(recipe, overrides)
    else:
        found = _checked_trainer(str(trl))
    if as_json:
        _print_json(found)
    else:
        _print(found, Console(highlight=False))
    raise typer.Exit(0 if found.ok else 1)


def _refuse_recorded_code(recipe: Path, *, run_code: bool) -> None:
    """Raise if the recipe of a run folder names code: the folder may be untrusted."""
    from klinic.evidence.run_facts import is_recorded
    from klinic.evidence.schema import refuse_newer
    from klinic.recipe.recorded import list_code, load_recorded

    if not is_recorded(recipe):
        return
    refuse_newer(recipe.parent)
    recorded = load_recorded(recipe, run_code=run_code)
    announce_code(recorded.allowed, ())
    if recorded.refused:
        raise ConfigError(
            f"{recipe} is the recipe of a run folder and names code "
            f"({list_code(recorded.refused)}), which a check would run. Pass --run-code if you "
            "trust the author of the run, or check a recipe of your own."
        )


def _checked_recipe(recipe: Path, overrides: list[str] | None) -> "Checked":
    from rich.console import Console

    from klinic.recipe.loading import flags_to_overrides, load

    loaded = load(recipe, flags_to_overrides(overrides or []))
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.probe.single_batch import single_batch

        return single_batch(loaded.recipe, lambda what: status.update(f"{what} ..."))


def _checked_trainer(target: str) -> "Checked":
    from rich.console import Console

    from klinic.recipe.function import find_function

    require("trl", "trl", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.integrations.trl.single_batch import single_batch

        make = find_function(target, example="train.py:make_trainer")
        return single_batch(make, target, lambda what: status.update(f"{what} ..."))


def _print_json(found: "Checked") -> None:
    assert found.diagnosis is not None  # noqa: S101 - set once the batch is done
    parts = [{"name": p.name, "ok": p.ok, "says": p.says} for p in found.parts]
    shown = [{"prompt": p, "completion": c, "reward": r} for p, c, r in found.shown]
    print_json("check", ok=found.ok, parts=parts, completions=shown, **found.diagnosis.to_json())


def _print(found: "Checked", console: "Console") -> None:
    for part in found.parts:
        say(console, f"{'✓' if part.ok else '✗'} {part.name}: {part.says}")
    say(console)
    for prompt, completion, reward in found.shown:
        say(console, f"  {reward:+.3f}  {prompt!r} -> {completion!r}")
    diagnosis = found.diagnosis
    assert diagnosis is not None  # noqa: S101 - set once the batch is done
    decided = [h for h in diagnosis.hypotheses if h.num_judged]
    failed = [h for h in decided if h.num_failed]
    say(console)
    say(console, f"{len(decided)} of {len(diagnosis.hypotheses)} causes could be tested.")
    for hypothesis in failed:
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        say(console, f"✗ {hypothesis.check.name}: {summary}")
    if diagnosis.cause is not None:
        say(console, f"\nCause: {diagnosis.cause}\nFix: {diagnosis.fix}")
    say(console, "\nReady to train." if found.ok else "\nNot ready to train.")
