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

    from klinic.recipe.recipe import Recipe as RecipeModel
    from klinic.replay.check_report import CheckReport


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
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Set model.device (cuda, cuda:N, xpu, cpu or auto), test this device in full, and "
        "write the results to a text file for bug reports.",
        show_default=False,
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="With --device: the text file.")
]


def check(  # noqa: PLR0913, PLR0917 - options of a command line
    recipe: Recipe = None,
    overrides: Overrides = None,
    trl: Trl = None,
    device: Device = None,
    output: Output = Path("klinic-selftest.txt"),
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
    if recipe is None:
        if device is not None:
            raise ConfigError(
                "--device needs a recipe: a TRL trainer chooses its device itself. Omit it."
            )
        result = _check_trainer(str(trl))
    else:
        _refuse_recorded_code(recipe, run_code=run_code)
        result = (
            _check_recipe(recipe, overrides)
            if device is None
            else _test_device(recipe, overrides, device, output)
        )
    if as_json:
        _print_json(result)
    else:
        console = Console(highlight=False)
        _print_result(result, console)
        if device is not None:
            print_line(console, f"Results of the device, for a bug report: {output}")
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


def _test_device(
    recipe: Path, overrides: list[str] | None, device: str, output: Path
) -> "CheckReport":
    """Check a recipe on a device, and write the results to a file, also those before an error."""
    from rich.console import Console

    from klinic.recipe.loading import flags_to_overrides, load_recipe

    settings = [*flags_to_overrides(overrides or []), f"model.device={device}"]
    loaded = load_recipe(recipe, settings).recipe
    if loaded.learner.shards > 1 or loaded.cluster is not None:
        raise ConfigError(
            "--device tests a learner in one process, but the recipe has several (learner.shards "
            "or a cluster section). Set learner.shards=1 cluster=null."
        )
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.model.device import resolve_device
        from klinic.replay.check_report import CheckReport
        from klinic.replay.self_test_report import SelfTestFile
        from klinic.replay.single_batch import check_single_batch

        result = CheckReport()
        with SelfTestFile(output, resolve_device(device), result):
            return check_single_batch(
                loaded,
                lambda what: status.update(f"{what} ..."),
                predict_memory=_predict_memory,
                result=result,
            )


def _predict_memory(recipe: "RecipeModel") -> int | None:
    """Return the peak memory of a recipe, as --dry-run predicts it; None if that is not known."""
    from klinic.capacity.forecast import forecast_memory
    from klinic.capacity.memory import largest_phase
    from klinic.capacity.meta_policy import is_config_reachable
    from klinic.model.device import resolve_device

    models = [recipe.model.name]
    if recipe.kl is not None and recipe.reference.path is not None:
        models.append(recipe.reference.path)
    if not all(is_config_reachable(name) for name in models):
        return None
    num_gpus = 0 if resolve_device(recipe.model.device).type == "cpu" else 1
    return largest_phase(forecast_memory(recipe, num_gpus=num_gpus).phases).total_bytes


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
