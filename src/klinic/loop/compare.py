"""A trained model against what it started from: accuracy, exact KL, and what was kept."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import CheckpointError, ConfigError
from klinic.evidence.run_facts import RECIPE
from klinic.learner.checkpoint import MODEL
from klinic.loop import checkpoint
from klinic.loop.evaluate import (
    Distance,
    HeldOut,
    accuracy,
    answers,
    distance,
    mean_reward,
    retention,
)
from klinic.loop.folder import START
from klinic.loop.reading import Row
from klinic.loop.rows import read_rows
from klinic.loop.source import FROM_PYTHON, Given, Source, find_source
from klinic.model.adapter_files import is_adapter
from klinic.model.determinism import settle_kernels
from klinic.model.loading import Policy, load_policy
from klinic.model.reference import frozen
from klinic.model.weights import digest
from klinic.recipe.loading import load
from klinic.recipe.model import ModelSection
from klinic.recipe.recipe import Recipe
from klinic.tasks import catalogue
from klinic.tasks.base import Task

LONGEST = 256  # tokens of a completion, where no recipe says


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated: a model, and the run it comes from if it comes from one."""

    model: str
    recipe: Recipe | None
    reference: str | None
    """What the run was tied to, or started from."""
    digest: str | None = None
    """Of the weights of that reference, where the run kept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measures of one model; None where there is nothing to measure by."""

    model: str
    reference: str | None
    accuracy: dict[str, float]
    reference_accuracy: dict[str, float] | None
    retention: float | None
    """Share of what was not trained (other skills, or the `retention` rows) which is left."""
    trained: str | None
    reward: float | None
    """Mean of greedy completions, by the rewards that the recipe names."""
    reference_reward: float | None
    kl: Distance | None


def find_subject(path: str) -> Subject:
    """Return the model in a run folder, a checkpoint or a model folder, or of a hub id."""
    folder = Path(path)
    if (folder / RECIPE).is_file():
        found = checkpoint.newest_good(folder)
        if found.checkpoint is None:
            why = found.broken[0] if found.broken else "it has none yet."
            raise CheckpointError(f"{folder} has no checkpoint: {why}")
        return _of_run(found.checkpoint.folder, folder)
    if (folder / checkpoint.MANIFEST).is_file():
        step = checkpoint.step_of(folder)
        return _of_run(checkpoint.read(folder, step).folder, folder.parent.parent)
    if folder.name == MODEL and (folder.parent / checkpoint.MANIFEST).is_file():
        return find_subject(str(folder.parent))
    return Subject(model=path, recipe=None, reference=None)


def _of_run(saved: Path, run: Path) -> Subject:
    recipe = load(run / RECIPE).recipe
    state = json.loads((saved / checkpoint.STATE).read_text())
    source = state["reference"]["source"]
    start = run / START
    if source is None:
        source = str(start) if start.is_dir() else recipe.model.name
    elif not Path(source).is_dir() and start.is_dir():
        source = str(start)  # the folder was moved with its run
    # the model of a fresh adapter has other names than the same model without one
    kind = state["reference"]["kind"]
    fresh = kind == "adapter_off" or (kind == "adapter_frozen" and not is_adapter(source))
    kept = None if fresh else state["reference"]["digest"]
    return Subject(model=str(saved / MODEL), recipe=recipe, reference=source, digest=kept)


def evaluate_subject(
    subject: Subject, *, reference: str | None, prompts: str | None, task: str | None, num: int
) -> Evaluation:
    """Measure a model, and its distance from a reference where there is one."""
    settle_kernels()
    recipe = subject.recipe
    name = task or (None if recipe is None else recipe.data.task)
    found = None if name is None else catalogue.find(name)
    own = None if found is not None else _own_data(recipe)
    if found is None and own is None and prompts is None:
        missing = "" if Path(subject.model).exists() else " (there is no such folder here)"
        raise ConfigError(
            f"{subject.model}{missing} does not say what it was trained on. Give --task "
            "(arithmetic) to measure accuracy, or --prompts FILE to measure its KL to a "
            "--reference on them."
        )
    policy = _policy(subject.model, recipe)
    ref_name = subject.reference if reference is None else find_subject(reference).model
    ref = None if ref_name is None else _policy(ref_name, recipe)
    if ref is not None and reference is None:
        _refuse_other(subject, ref)
    longest = LONGEST if recipe is None else recipe.sampling.max_new_tokens
    trained = None
    if found is not None:
        trained = (recipe.data.skill if recipe else None) or found.default_skill
    held_out = _held_out(own) if found is None else _held_out_of(recipe, found, trained, num)
    kept = None if own is None else own.kept
    reply = None if own is None else own.reply

    def reward(judged: Policy | None, by: HeldOut | None) -> float | None:
        if judged is None or by is None:
            return None
        return mean_reward(judged, by, num=num, max_new_tokens=longest, reply=reply)

    now = _accuracy(policy, found, num, longest)
    before = None if ref is None else _accuracy(ref, found, num, longest)
    return Evaluation(
        model=subject.model,
        reference=ref_name,
        accuracy=now,
        reference_accuracy=before,
        trained=trained,
        reward=reward(policy, held_out),
        reference_reward=reward(ref, held_out),
        retention=retention(now, before, trained)
        if before and trained
        else _share(reward(policy, kept), reward(ref, kept)),
        kl=None
        if ref is None
        else distance(
            policy,
            frozen(ref.scorer, source=str(ref_name)),
            _rows(prompts, held_out, found, trained, num)[:num],
            max_new_tokens=longest,
            reply=reply,
        ),
    )


def _share(now: float | None, before: float | None) -> float | None:
    return now / before if now is not None and before else None


def _policy(name: str, recipe: Recipe | None) -> Policy:
    temperature = 1.0 if recipe is None else recipe.sampling.temperature
    dtype = "fp32" if recipe is None else recipe.model.dtype
    remote = False if recipe is None else recipe.model.trust_remote_code
    section = ModelSection(name=name, dtype=dtype, trust_remote_code=remote)
    return load_policy(section, temperature=temperature, seed=0)


def _refuse_other(subject: Subject, ref: Policy) -> None:
    """Refuse a reference that is not the one the run was tied to."""
    if subject.digest is not None and digest(ref.lm.state_dict()) != subject.digest:
        raise CheckpointError(
            f"{subject.reference} is not the reference that the run was tied to: its digest has "
            "changed. Restore it, or name another with --reference."
        )


def _accuracy(policy: Policy, task: Task | None, num: int, longest: int) -> dict[str, float]:
    if task is None:
        return {}
    return accuracy(task, answers(policy, task, num=num, max_new_tokens=longest))


def _own_data(recipe: Recipe | None) -> Source | None:
    """Return the rows and rewards that a recipe names; those handed over in Python are gone."""
    if recipe is None or recipe.data.path in {None, FROM_PYTHON} or not recipe.rewards:
        return None
    return find_source(recipe, Given())


def _held_out(own: Source | None) -> HeldOut | None:
    """Return what is held out, or the training rows where nothing is."""
    if own is None or own.held_out is not None:
        return None if own is None else own.held_out
    return HeldOut(rows=own.rows, rewards=own.rewards)


def _held_out_of(recipe: Recipe | None, task: Task, skill: str | None, num: int) -> HeldOut | None:
    """Return a task's own rows with the rewards that the recipe names; without any, None."""
    if recipe is None or not recipe.rewards or recipe.data.task != task.name or skill is None:
        return None
    return HeldOut(rows=task.eval_rows(skill, num), rewards=find_source(recipe, Given()).rewards)


def _rows(
    prompts: str | None, held_out: HeldOut | None, task: Task | None, skill: str | None, num: int
) -> Sequence[Row]:
    if prompts is not None:
        return read_rows(prompts)
    if held_out is not None:
        return held_out.rows
    assert task is not None and skill is not None  # noqa: S101, PT018 - one of them is given
    return task.eval_rows(skill, num)
