"""Reads the results of trials and runs from folders; writes them as Parquet."""

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
    """All results of an ablation with table, verdict and failures."""

    results: list[Result]
    curves: dict[str, list[list[dict[str, float]]]]
    table: list[Row]
    learnt: str
    """Name of the measure of the trained skill."""
    verdict: Verdict
    failures: list[tuple[str, str]]
    baseline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run: setting, seed and measures."""

    result: Result
    run: Path


def find(
    done: Sequence[Done], failures: Sequence[tuple[str, str]], baseline: str | None
) -> Findings:
    """Summarise finished trials; the baseline defaults to the first setting."""
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
    """Return the finished trials of an ablation, ordered by setting and seed."""
    order = list(dict.fromkeys(place.trial.setting.name for place in places))
    done = [
        Done(result=read_json(place.folder / RESULT), run=place.folder / RUN)
        for place in places
        if place.is_finished
    ]
    return sorted(done, key=lambda one: (order.index(one.result["setting"]), one.result["seed"]))


def failed(places: Sequence[Place]) -> list[tuple[str, str]]:
    """Return the failed trials with their reasons."""
    named = ((f"{p.trial.setting.name} seed {p.trial.seed}", p.failure) for p in places)
    return [(name, why) for name, why in named if why is not None]


def read_folders(folders: Sequence[Path], *, run_code: bool = False) -> list[Done]:
    """Return the finished trials in ablation folders, and evaluate the runs in run folders.

    Code that the recipes of those runs name is executed only with `run_code`.
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
            f"{twice[0]} with seed {twice[1]} occurs twice, but runs are paired by seed. "
            "Give one folder of each."
        )
    return done


def write_parquet(folder: Path, found: Findings) -> None:
    """Write trials.parquet and steps.parquet."""
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
    """Evaluate runs outside ablations, named by the keys in which their recipes differ."""
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
    """Return a name for each recipe: the keys that differ, with their values.

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
