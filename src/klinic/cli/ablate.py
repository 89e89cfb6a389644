"""`klinic ablate`: run variants of a recipe over seeds and compare them."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.ablate_power import print_power
from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.lab.ablation.comparison import Question
    from klinic.lab.ablation.plan import Plan
    from klinic.lab.ablation.results import AblationSummary
    from klinic.lab.ablation.trial import TrialFolder

ABLATIONS = Path("ablations")

RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE ...]",
        help="A YAML recipe, and keys to override; with --plot, result folders.",
        show_default=False,
    ),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=A,B,C",
        help="A key and its values. If repeated, every combination is run.",
        show_default=False,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each setting.")]
Starts = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=A,B,C",
        help="A key that changes the initial weights, such as warm_start.seed=1,2,3; each start "
        "has --seeds runs.",
        show_default=False,
    ),
]
Outcome = Annotated[
    str | None,
    typer.Option(help="The measure that is tested, such as accuracy; default: all, and the score."),
]
Margin = Annotated[
    float | None,
    typer.Option(help="Differences below it count as equal: tests equivalence."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        *("--out", "-o"),
        help="Output folder; rerunning the command continues there.",
        show_default="ablations/...",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(min=1, help="Concurrent trials, on Ray Tune; default: one at a time."),
]
Address = Annotated[
    str | None, typer.Option(help="Run the trials on the Ray cluster at this address.")
]
Baseline = Annotated[
    str | None,
    typer.Option(help="The setting to compare against, such as kl.coef=0; default: the first."),
]
Prompts = Annotated[
    int | None, typer.Option(min=1, help="Held-out prompts per evaluation; default: the recipe's.")
]
Detect = Annotated[
    float | None,
    typer.Option(help="Run nothing: print the seeds that show this difference, from folders."),
]
Plot = Annotated[bool, typer.Option("--plot", help="Run nothing: redraw from finished folders.")]


def ablate(  # noqa: PLR0913, PLR0917 - options of a command line
    what: RecipeAndOverrides = None,
    vary: Vary = None,
    seeds: Seeds = 3,
    starts: Starts = None,
    outcome: Outcome = None,
    margin: Margin = None,
    out: Out = None,
    parallel: Parallel = None,
    address: Address = None,
    baseline: Baseline = None,
    prompts: Prompts = None,
    plot: Plot = False,
    detect: Detect = None,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Run variants of a recipe over seeds; recommend a value and give the evidence."""
    question = _make_question(outcome, margin)
    if not what:
        raise ConfigError("give a recipe, such as recipes/arithmetic.yaml, or --plot and folders.")
    if detect is not None:
        print_power(what, baseline, detect, question, None if json else _make_console())
        return
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    require_modules("plot", "matplotlib")

    from klinic.lab.ablation.results import (
        failed_trials,
        finished_runs,
        read_folders,
        summarize_runs,
    )

    console = _make_console(stderr=json)
    if plot:
        folders = [Path(name) for name in what]
        folder = out or folders[0]
        _announce_run_code(folders, run_code=run_code)
        runs = read_folders(folders, run_code=run_code)
        findings = summarize_runs(runs, [], baseline, question)
    else:
        where = TrialPlacement(parallel=parallel, address=address)
        where.require_ray()
        plan = _make_plan(what, vary or [], seeds, baseline, starts)
        folder = out or ABLATIONS / f"{Path(what[0]).stem}-{plan.digest}"
        trials = _run_trials(folder, plan, prompts, where, console)
        runs = finished_runs(trials)
        findings = summarize_runs(runs, failed_trials(trials), baseline, question)
    _write_results(folder, findings)
    _print_results(folder, findings, console, json=json)
    raise typer.Exit(1 if findings.failures else 0)


def _make_console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _make_question(outcome: str | None, margin: float | None) -> "Question":
    """Return what is tested; raise if the outcome is not compared."""
    from klinic.lab.ablation.comparison import COMPARED, Question

    if outcome is not None and outcome not in COMPARED:
        names = ", ".join(COMPARED)
        raise ConfigError(f"--outcome {outcome} is not compared. Name one of {names}.")
    if margin is not None and not margin > 0:
        raise ConfigError(f"--margin {margin:g}: name a margin above 0.")
    return Question(outcome=outcome, margin=margin)


def _announce_run_code(folders: list[Path], *, run_code: bool) -> None:
    """Print which code of finished runs is executed or skipped."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.lab.ablation.plan import PLAN
    from klinic.recipe.recorded import load_recorded

    for folder in folders:
        if (folder / RECIPE).is_file() and not (folder / PLAN).is_file():
            recorded = load_recorded(folder / RECIPE, run_code=run_code)
            announce_code(recorded.allowed, recorded.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlacement:
    """Where trials run: sequentially in this process, or on Ray."""

    parallel: int | None
    address: str | None

    @property
    def on_ray(self) -> bool:
        """Whether Ray Tune runs the trials."""
        return self.parallel is not None or self.address is not None

    def require_ray(self) -> None:
        """Raise if the trials run on Ray and it is not installed."""
        if self.on_ray:
            require_modules("ray", "ray", "pandas", "fsspec")


def _make_plan(
    what: list[str], vary: list[str], seeds: int, baseline: str | None, starts: str | None
) -> "Plan":
    """Return the plan; raise if the baseline is not one of its settings."""
    from klinic.lab.ablation.plan import make_plan
    from klinic.recipe.loading import flags_to_overrides

    plan = make_plan(Path(what[0]), flags_to_overrides(what[1:]), vary, seeds, starts)
    names = [setting.name for setting in plan.settings()]
    if baseline is not None and baseline not in names:
        raise ConfigError(f"--baseline {baseline} is not a setting. Settings: {', '.join(names)}.")
    return plan


def _run_trials(
    folder: Path, plan: "Plan", prompts: int | None, where: TrialPlacement, console: "Console"
) -> "list[TrialFolder]":
    """Run the unfinished trials with progress bars."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.lab.ablation.plan import open_ablation, setting_overrides
    from klinic.lab.ablation.sequence import progress_bars, run_in_sequence
    from klinic.lab.ablation.trial import create_trial_folders as make_places
    from klinic.recipe.loading import load_recipe

    open_ablation(folder, plan)
    trials = make_places(folder, plan, prompts)
    recipe = load_recipe(folder / RECIPE, setting_overrides(plan, plan.settings()[0])).recipe
    done = sum(trial.is_finished for trial in trials)
    print_line(
        console,
        f"{len(plan.settings())} settings x "
        + (f"{len(plan.starts)} starts x " if plan.starts else "")
        + f"{plan.seeds} {'seed' if plan.seeds == 1 else 'seeds'} "
        f"in {folder}" + (f": {done} of {len(trials)} trials are already finished" if done else ""),
    )
    try:
        with progress_bars(trials, recipe.loop.max_steps, console):
            if where.on_ray:
                from klinic.lab.ablation.on_tune import run_on_tune

                run_on_tune(
                    trials,
                    address=where.address,
                    max_concurrent=where.parallel or len(trials),
                    num_cpus=recipe.threads or 1,
                    storage=folder,
                )
            else:
                run_in_sequence(trials)
    except KeyboardInterrupt:
        print_line(console, "Stopped. Rerun the same command to continue.")
        raise typer.Exit(130) from None
    return trials


def _write_results(folder: Path, findings: "AblationSummary") -> None:
    """Write plots, page and raw data."""
    from klinic.lab.ablation.page import PageContent, write_page
    from klinic.lab.ablation.plots import write_plots
    from klinic.lab.ablation.results import write_parquet

    if not findings.results:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(folder, findings)
    content = PageContent(
        title=f"Ablation: {folder.name}",
        command=shlex.join(["klinic", *sys.argv[1:]]),
        rows=findings.table,
        verdict=findings.verdict,
        failures=findings.failures,
        baseline=findings.baseline,
    )
    write_page(
        folder, content, write_plots(folder, findings.table, findings.curves, findings.learnt)
    )


def _print_results(
    folder: Path, findings: "AblationSummary", console: "Console", *, json: bool
) -> None:
    from klinic.cli.ablation_view import print_results

    if json:
        print_json("ablate", ok=not findings.failures, **_json_content(folder, findings))
    else:
        print_results(folder, findings, console)


def _json_content(folder: Path, findings: "AblationSummary") -> dict[str, object]:
    return {
        "folder": str(folder),
        "recommended": findings.verdict.best,
        "says": findings.verdict.says,
        "decisions": findings.verdict.decisions,
        "outcome": findings.question.outcome,
        "margin": findings.question.margin,
        "settings": findings.table,
        "trials": findings.results,
        "failures": [{"trial": name, "why": why} for name, why in findings.failures],
    }
