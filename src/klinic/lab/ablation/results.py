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
from klinic.lab.ablation.comparison import (
    ALL_MEASURES,
    Question,
    Result,
    SettingRow,
    setting_rows,
    skill_measure_name,
)
from klinic.lab.ablation.measures import measure_run, read_curves
from klinic.lab.ablation.plan import PLAN, read_plan
from klinic.lab.ablation.starts import describe_sample
from klinic.lab.ablation.trial import RESULT, RUN, TrialFolder
from klinic.lab.ablation.verdict import Verdict, recommend_setting
from klinic.recipe.keys import flatten_settings

TRIALS = "trials.parquet"
NOT_VARIED = ("seed", "output.", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSummary:
    """All results of an ablation with table, verdict and failures."""

    results: list[Result]
    curves: dict[str, list[list[dict[str, float]]]]
    table: list[SettingRow]
    learnt: str
    """Name of the measure of the trained skill."""
    verdict: Verdict
    failures: list[tuple[str, str]]
    baseline: str
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run: setting, seed and measures."""

    result: Result
    run: Path


def summarize_runs(
    runs: Sequence[FinishedRun],
    failures: Sequence[tuple[str, str]],
    baseline: str | None,
    question: Question = ALL_MEASURES,
) -> AblationSummary:
    """Summarise finished trials; the baseline defaults to the first setting."""
    settings = list(dict.fromkeys(one.result["setting"] for one in runs))
    results = [one.result for one in runs]
    by_setting: dict[str, list[list[dict[str, float]]]] = {setting: [] for setting in settings}
    for one in runs:
        by_setting[one.result["setting"]].append(read_curves(one.run))
    against = baseline or (settings[0] if settings else "")
    table = setting_rows(results, settings, against, question)
    skill = skill_measure_name(results)
    return AblationSummary(
        results=results,
        curves=by_setting,
        baseline=against,
        table=table,
        learnt=skill,
        verdict=recommend_setting(table, skill, question, describe_sample(results)),
        question=question,
        failures=list(failures),
    )


def finished_runs(trial_folders: Sequence[TrialFolder]) -> list[FinishedRun]:
    """Return the finished trials of an ablation, ordered by setting and seed."""
    order = list(dict.fromkeys(trial_folder.trial.setting.name for trial_folder in trial_folders))
    done = [
        FinishedRun(result=read_json(trial_folder.path / RESULT), run=trial_folder.path / RUN)
        for trial_folder in trial_folders
        if trial_folder.is_finished
    ]
    return sorted(done, key=lambda one: (order.index(one.result["setting"]), one.result["seed"]))


def failed_trials(trial_folders: Sequence[TrialFolder]) -> list[tuple[str, str]]:
    """Return the failed trials with their reasons."""
    named = ((f"{p.trial.setting.name} seed {p.trial.seed}", p.failure) for p in trial_folders)
    return [(name, why) for name, why in named if why is not None]


def read_folders(folders: Sequence[Path], *, run_code: bool = False) -> list[FinishedRun]:
    """Return the finished trials in ablation folders, and evaluate the runs in run folders.

    Code that the recipes of those runs name is executed only with `run_code`.
    """
    done: list[FinishedRun] = []
    runs: list[Path] = []
    for folder in folders:
        if (folder / PLAN).is_file():
            trials = read_plan(folder).trials()
            done += finished_runs([TrialFolder(trial=t, path=folder / t.folder) for t in trials])
        elif (folder / RECIPE).is_file():
            runs.append(folder)
        else:
            raise ConfigError(
                f"{folder} holds neither an ablation nor a run. Give folders that `klinic ablate` "
                "or `klinic train` wrote."
            )
    done += _evaluate_runs(runs, run_code=run_code)
    named = [(one.result["setting"], one.result["seed"]) for one in done]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice[0]} with seed {twice[1]} occurs twice, but runs are paired by seed. "
            "Give one folder of each."
        )
    return done


def write_parquet(folder: Path, summary: AblationSummary) -> None:
    """Write trials.parquet and steps.parquet."""
    _write_table(folder / TRIALS, pa.Table.from_pylist([dict(r) for r in summary.results]))
    seeds = {s: [r["seed"] for r in summary.results if r["setting"] == s] for s in summary.curves}
    steps = [
        {"setting": setting, "seed": seed, **step}
        for setting, runs in summary.curves.items()
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


def _evaluate_runs(runs: Sequence[Path], *, run_code: bool) -> list[FinishedRun]:
    """Evaluate runs outside ablations, named by the keys in which their recipes differ."""
    if not runs:
        return []
    from klinic.recipe.loading import load_recipe
    from klinic.training.compare import evaluate_subject, find_subject

    recipes = [load_recipe(run / RECIPE).recipe for run in runs]
    values = [flatten_settings(recipe.model_dump(mode="json")) for recipe in recipes]
    done = []
    for run, recipe, name in zip(runs, recipes, _differing_keys(values), strict=True):
        evaluation = evaluate_subject(
            find_subject(str(run), run_code=run_code),
            reference=None,
            prompts=None,
            task=None,
            num=recipe.loop.eval_prompts,
        )
        result = {"setting": name, "seed": recipe.seed, **measure_run(run, evaluation)}
        done.append(FinishedRun(result=result, run=run))
    return sorted(done, key=lambda one: (one.result["setting"], one.result["seed"]))


def _differing_keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each recipe: the keys that differ, with their values.

    >>> _differing_keys([{"kl.coef": 0.1, "seed": 1}, {"kl.coef": 0.2, "seed": 2}])
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
