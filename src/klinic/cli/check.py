"""`klinic check RECIPE`: test every component on one batch before training; exit code for CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.cli.train import Overrides
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.replay.single_batch import CheckReport


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
        result = _check_recipe(recipe, overrides)
    else:
        result = _check_trainer(str(trl))
    if as_json:
        _print_json(result)
    else:
        _print_result(result, Console(highlight=False))
    raise typer.Exit(0 if result.ok else 1)


def _refuse_recorded_code(recipe: Path, *, run_code: bool) -> None:
    """Raise if the recipe of a run folder names code: the folder may be untrusted."""
    from klinic.evidence.run_facts import is_run_recipe
    from klinic.evidence.schema import refuse_newer
    from klinic.recipe.recorded import list_code, load_recorded

    if not is_run_recipe(recipe):
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


def _check_recipe(recipe: Path, overrides: list[str] | None) -> "CheckReport":
    from rich.console import Console

    from klinic.recipe.loading import flags_to_overrides, load_recipe

    loaded = load_recipe(recipe, flags_to_overrides(overrides or []))
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.replay.single_batch import check_single_batch

        return check_single_batch(loaded.recipe, lambda what: status.update(f"{what} ..."))


def _check_trainer(target: str) -> "CheckReport":
    from rich.console import Console

    from klinic.recipe.function import find_function

    require_modules("trl", "trl", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.integrations.trl.single_batch import check_trl_trainer

        make = find_function(target, example="train.py:make_trainer")
        return check_trl_trainer(make, target, lambda what: status.update(f"{what} ..."))


def _print_json(result: "CheckReport") -> None:
    assert result.diagnosis is not None  # noqa: S101 - set once the batch is done
    parts = [{"name": p.name, "ok": p.ok, "says": p.detail} for p in result.components]
    shown = [{"prompt": p, "completion": c, "reward": r} for p, c, r in result.samples]
    print_json("check", ok=result.ok, parts=parts, completions=shown, **result.diagnosis.to_json())


def _print_result(result: "CheckReport", console: "Console") -> None:
    for part in result.components:
        print_line(console, f"{'✓' if part.ok else '✗'} {part.name}: {part.detail}")
    print_line(console)
    for prompt, completion, reward in result.samples:
        print_line(console, f"  {reward:+.3f}  {prompt!r} -> {completion!r}")
    diagnosis = result.diagnosis
    assert diagnosis is not None  # noqa: S101 - set once the batch is done
    decided = [h for h in diagnosis.hypotheses if h.num_judged]
    failed = [h for h in decided if h.num_failed]
    print_line(console)
    print_line(console, f"{len(decided)} of {len(diagnosis.hypotheses)} causes could be tested.")
    for hypothesis in failed:
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        print_line(console, f"✗ {hypothesis.check.name}: {summary}")
    if diagnosis.cause is not None:
        print_line(console, f"\nCause: {diagnosis.cause}\nFix: {diagnosis.fix}")
    print_line(console, "\nReady to train." if result.ok else "\nNot ready to train.")
