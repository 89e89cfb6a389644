"""What trials left behind: read from folders, written as Parquet, drawn and put on a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from klinic.errors import ConfigError
from klinic.evidence.files import read_json
from klinic.evidence.run_facts import RECIPE
from klinic.evidence.writing import write_atomically
from klinic.lab.ablation.measures import curves, measure
from klinic.lab.ablation.plan import PLAN, read_plan
from klinic.lab.ablation.trial import RESULT, RUN, Place
from klinic.lab.ablation.verdict import Result, Row, Verdict, learnt_by, recommend, rows
from klinic.recipe.keys import dotted

NOT_VARIED = ("seed", "output.", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results, what they add up to, and what is missing."""

    results: list[Result]
    curves: dict[str, list[list[dict[str, float]]]]
    table: list[Row]
    learnt: str
    """The measure of what was learnt."""
    verdict: Verdict
    failures: list[tuple[str, str]]
    baseline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run with what it is called and what was measured of it."""

    result: Result
    run: Path


def find(
    done: Sequence[Done], failures: Sequence[tuple[str, str]], baseline: str | None
) -> Findings:
    """Return what finished trials add up to; the first setting is the baseline unless told."""
    settings = list(dict.fromkeys(one.result["setting"] for one in done))
    results = [one.result for one in done]
    by_setting: dict[str, list[list[dict[str, float]]]] = {setting: [] for setting in settings}
    for one in done:
        by_setting[one.result["setting"]].append(curves(one.run))
    against = baseline or (settings[0] if settings else "")
    return Findings(
        results=results,
        curves=by_setting,
        baseline=against,
        table=rows(results, settings, against),
        learnt=learnt_by(results),
        verdict=recommend(results, settings),
        failures=list(failures),
    )


def finished(places: Sequence[Place]) -> list[Done]:
    """Return the trials of an ablation that have a result, in the order of their settings."""
    order = list(dict.fromkeys(place.trial.setting.name for place in places))
    done = [
        Done(result=read_json(place.folder / RESULT), run=place.folder / RUN)
        for place in places
        if place.is_finished
    ]
    return sorted(done, key=lambda one: (order.index(one.result["setting"]), one.result["seed"]))


def failed(places: Sequence[Place]) -> list[tuple[str, str]]:
    """Return the trials that failed, each with why."""
    named = ((f"{p.trial.setting.name} seed {p.trial.seed}", p.failure) for p in places)
    return [(name, why) for name, why in named if why is not None]


def read_folders(folders: Sequence[Path], *, run_code: bool = False) -> list[Done]:
    """Return the finished trials of ablations and the runs in the other folders.

    Those runs are measured, with the code that their recipes name only where `run_code` allows it.
    """
    done: list[Done] = []
    runs: list[Path] = []
    for folder in folders:
        if (folder / PLAN).is_file():
            trials = read_plan(folder).trials()
            done += finished([Place(trial=t, folder=folder / t.folder) for t in trials])
        elif (folder / RECIPE).is_file():
            runs.append(folder)
        else:
            raise ConfigError(
                f"{folder} holds neither an ablation nor a run. Give folders that `klinic ablate` "
                "or `klinic train` wrote."
            )
    done += _measured(runs, run_code=run_code)
    named = [(one.result["setting"], one.result["seed"]) for one in done]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice[0]} with seed {twice[1]} is there twice, and seeds are what is compared. "
            "Give one folder of each."
        )
    return done


def write_parquet(folder: Path, found: Findings) -> None:
    """Write every trial and every step."""
    _write_table(folder / "trials.parquet", pa.Table.from_pylist([dict(r) for r in found.results]))
    seeds = {s: [r["seed"] for r in found.results if r["setting"] == s] for s in found.curves}
    steps = [
        {"setting": setting, "seed": seed, **step}
        for setting, runs in found.curves.items()
        for seed, run in zip(seeds[setting], runs, strict=True)
        for step in run
    ]
    names = list(dict.fromkeys(name for step in steps for name in step))
    columns = {name: [step.get(name) for step in steps] for name in names}
    _write_table(folder / "steps.parquet", pa.table(columns))


def _write_table(path: Path, table: Any) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomically(path, sink.getvalue().to_pybytes())


def _measured(runs: Sequence[Path], *, run_code: bool) -> list[Done]:
    """Measure runs that no ablation made, named by what their recipes differ in."""
    if not runs:
        return []
    from klinic.loop.compare import evaluate_subject, find_subject
    from klinic.recipe.loading import load

    recipes = [load(run / RECIPE).recipe for run in runs]
    values = [dotted(recipe.model_dump(mode="json")) for recipe in recipes]
    done = []
    for run, recipe, name in zip(runs, recipes, _differences(values), strict=True):
        found = evaluate_subject(
            find_subject(str(run), run_code=run_code),
            reference=None,
            prompts=None,
            task=None,
            num=recipe.loop.eval_prompts,
        )
        result = {"setting": name, "seed": recipe.seed, **measure(run, found)}
        done.append(Done(result=result, run=run))
    return sorted(done, key=lambda one: (one.result["setting"], one.result["seed"]))


def _differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each: the keys that are not the same in all of them.

    >>> _differences([{"kl.coef": 0.1, "seed": 1}, {"kl.coef": 0.2, "seed": 2}])
    ['kl.coef=0.1', 'kl.coef=0.2']
    """
    keys = dict.fromkeys(key for one in values for key in one)
    varied = [
        key
        for key in keys
        if not key.startswith(NOT_VARIED) and len({repr(one.get(key)) for one in values}) > 1
    ]
    names = [" ".join(f"{key}={one.get(key)}" for key in varied) for one in values]
    return [name or "all equal" for name in names]
