"""`klinic ablate`: run variants of a recipe over seeds and compare them."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json, say
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from klinic.lab.ablation.plan import Plan
    from klinic.lab.ablation.results import Findings
    from klinic.lab.ablation.trial import Place

ABLATIONS = Path("ablations")

What = Annotated[
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
Out = Annotated[
    Path | None,
    typer.Option(
        help="Output folder; rerunning the command continues there.", show_default="ablations/..."
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
Plot = Annotated[bool, typer.Option("--plot", help="Run nothing: redraw from finished folders.")]


def ablate(  # noqa: PLR0913, PLR0917 - options of a command line
    what: What = None,
    vary: Vary = None,
    seeds: Seeds = 3,
    out: Out = None,
    parallel: Parallel = None,
    address: Address = None,
    baseline: Baseline = None,
    prompts: Prompts = None,
    plot: Plot = False,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Run variants of a recipe over seeds; recommend a value and give the evidence."""
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    require("plot", "matplotlib")
    from rich.console import Console

    from klinic.lab.ablation.results import failed, find, finished, read_folders

    if not what:
        raise ConfigError("give a recipe, such as recipes/arithmetic.yaml, or --plot and folders.")
    console = Console(stderr=json, highlight=False)
    if plot:
        folders = [Path(name) for name in what]
        folder = out or folders[0]
        _announce(folders, run_code=run_code)
        found = find(read_folders(folders, run_code=run_code), [], baseline)
    else:
        where = Where(parallel=parallel, address=address)
        if where.on_ray:
            require("ray", "ray", "pandas", "fsspec")
        plan = _planned(what, vary or [], seeds, baseline)
        folder = out or ABLATIONS / f"{Path(what[0]).stem}-{plan.digest}"
        places = _run(folder, plan, prompts, where, console)
        found = find(finished(places), failed(places), baseline)
    _write(folder, found)
    if json:
        print_json("ablate", ok=not found.failures, **_content(folder, found))
    else:
        _print(folder, found, console)
    raise typer.Exit(1 if found.failures else 0)


def _announce(folders: list[Path], *, run_code: bool) -> None:
    """Print which code of finished runs is executed or skipped."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.lab.ablation.plan import PLAN
    from klinic.recipe.recorded import load_recorded

    for folder in folders:
        if (folder / RECIPE).is_file() and not (folder / PLAN).is_file():
            recorded = load_recorded(folder / RECIPE, run_code=run_code)
            announce_code(recorded.allowed, recorded.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where trials run: sequentially in this process, or on Ray."""

    parallel: int | None
    address: str | None

    @property
    def on_ray(self) -> bool:
        """Whether Ray Tune runs the trials."""
        return self.parallel is not None or self.address is not None


def _planned(what: list[str], vary: list[str], seeds: int, baseline: str | None) -> "Plan":
    """Return the plan; raise if the baseline is not one of its settings."""
    from klinic.lab.ablation.plan import make_plan
    from klinic.recipe.loading import flags_to_overrides

    plan = make_plan(Path(what[0]), flags_to_overrides(what[1:]), vary, seeds)
    names = [setting.name for setting in plan.settings()]
    if baseline is not None and baseline not in names:
        raise ConfigError(f"--baseline {baseline} is not a setting. Settings: {', '.join(names)}.")
    return plan


def _run(
    folder: Path, plan: "Plan", prompts: int | None, where: Where, console: "Console"
) -> "list[Place]":
    """Run the unfinished trials with progress bars."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.lab.ablation.plan import open_ablation, overrides_of
    from klinic.lab.ablation.sequence import bars, run_in_sequence
    from klinic.lab.ablation.trial import places as make_places
    from klinic.recipe.loading import load

    open_ablation(folder, plan)
    places = make_places(folder, plan, prompts)
    recipe = load(folder / RECIPE, overrides_of(plan, plan.settings()[0])).recipe
    done = sum(place.is_finished for place in places)
    say(
        console,
        f"{len(plan.settings())} settings x {plan.seeds} {'seed' if plan.seeds == 1 else 'seeds'} "
        f"in {folder}" + (f": {done} of {len(places)} trials are already finished" if done else ""),
    )
    try:
        with bars(places, recipe.loop.max_steps, console):
            if where.on_ray:
                from klinic.lab.ablation.on_tune import run_on_tune

                run_on_tune(
                    places,
                    address=where.address,
                    at_once=where.parallel or len(places),
                    num_cpus=recipe.threads or 1,
                    storage=folder,
                )
            else:
                run_in_sequence(places)
    except KeyboardInterrupt:
        say(console, "Stopped. Rerun the same command to continue.")
        raise typer.Exit(130) from None
    return places


def _write(folder: Path, found: "Findings") -> None:
    """Write plots, page and raw data."""
    from klinic.lab.ablation.page import Content, write_page
    from klinic.lab.ablation.plots import draw
    from klinic.lab.ablation.results import write_parquet

    if not found.results:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(folder, found)
    content = Content(
        title=f"Ablation: {folder.name}",
        command=shlex.join(["klinic", *sys.argv[1:]]),
        rows=found.table,
        verdict=found.verdict,
        failures=found.failures,
        baseline=found.baseline,
    )
    write_page(folder, content, draw(folder, found.table, found.curves, found.learnt))


def _content(folder: Path, found: "Findings") -> dict[str, object]:
    return {
        "folder": str(folder),
        "recommended": found.verdict.best,
        "says": found.verdict.says,
        "settings": found.table,
        "trials": found.results,
        "failures": [{"trial": name, "why": why} for name, why in found.failures],
    }


def _print(folder: Path, found: "Findings", console: "Console") -> None:
    from klinic.lab.ablation.page import PAGE
    from klinic.lab.ablation.verdict import closing_lines

    if found.results:
        console.print(_table(found))
        for line in closing_lines(found.table, found.verdict):
            say(console, line)
        say(console)
        say(console, found.verdict.says)
    for name, why in found.failures:
        say(console, f"Failed: {name}: {why}")
    if found.failures:
        say(console, "Rerun the same command to retry failed trials.")
    if found.results:
        say(console, f"Page: {folder / PAGE}")


def _table(found: "Findings") -> "Table":
    from rich import box
    from rich.table import Table

    from klinic.lab.ablation.page import noise, shown, signed

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    learnt = found.learnt
    names = list(dict.fromkeys(("accuracy", learnt, "retention", "kl_token")))
    for name in [*names[:-1], "KL/token", f"{learnt} to baseline"]:
        table.add_column(name, justify="right")
    for row in found.table:
        gap = row.differences.get(learnt)
        means = (row.means[name] for name in names)
        table.add_row(
            row.setting,
            *(shown(mean).replace(" ", "") for mean in means),
            "baseline" if gap is None else f"{signed(gap).split(' ')[0]} {noise(gap)}".strip(),
        )
    return table
