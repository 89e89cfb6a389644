"""Compares a trained model with its reference: accuracy, reward, exact KL and retention."""

import json
from dataclasses import dataclass
from pathlib import Path

from klinic.data.dataset import read_rows
from klinic.errors import CheckpointError, ConfigError
from klinic.evidence.run_facts import RECIPE
from klinic.evidence.schema import STATE, refuse_newer
from klinic.learner.checkpoint import MODEL_DIR
from klinic.model.adapter_files import is_adapter
from klinic.model.determinism import initialize_vml_kernels
from klinic.model.loading import Policy, load_policy
from klinic.model.reference import make_reference
from klinic.model.weights import digest
from klinic.recipe.recipe import Recipe
from klinic.recipe.recorded import FLAG, NamedCode, list_code, load_recorded, without_model_code
from klinic.recipe.sections import ModelSection
from klinic.tasks import catalogue
from klinic.training import checkpoint
from klinic.training.eval_suite import EvalScores, make_eval_suite
from klinic.training.evaluation import ReferenceKL, kl_to_reference, retained_fraction
from klinic.training.run_folder import START_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to evaluate, and its run if it has one."""

    model: str
    recipe: Recipe | None
    """The run's recipe, without the code that it names unless that is allowed."""
    reference: str | None
    """The run's reference, or its start model."""
    allowed: tuple[NamedCode, ...] = ()
    """Code named by the recipe that is allowed to run."""
    refused: tuple[NamedCode, ...] = ()
    """Code named by the recipe that is not allowed to run."""
    digest: str | None = None
    """Digest of the reference weights, where the run recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements of one model; None where one does not apply."""

    model: str
    reference: str | None
    accuracy: dict[str, float]
    reference_accuracy: dict[str, float] | None
    retention: float | None
    """Retained fraction of untrained abilities (other skills, or reward on the `retention` rows).
    """
    trained: str | None
    reward: float | None
    """Mean reward of greedy completions, by the recipe's rewards."""
    reference_reward: float | None
    kl: ReferenceKL | None


def find_subject(path: str, *, run_code: bool = False) -> Subject:
    """Return the model of a run folder, a checkpoint, a model folder or a hub id.

    Code that the run's recipe names runs only with `run_code`.
    """
    folder = Path(path)
    if (folder / RECIPE).is_file():
        refuse_newer(folder)
        search = checkpoint.newest_valid(folder)
        if search.checkpoint is None:
            why = search.broken[0] if search.broken else "it has none yet."
            raise CheckpointError(f"{folder} has no checkpoint: {why}")
        return _subject_of_run(search.checkpoint.folder, folder, run_code=run_code)
    if (folder / checkpoint.MANIFEST).is_file():
        refuse_newer(folder.resolve().parent.parent)
        step = checkpoint.parse_step(folder)
        saved = checkpoint.read_checkpoint(folder, step).folder
        return _subject_of_run(saved, folder.parent.parent, run_code=run_code)
    if folder.name == MODEL_DIR and (folder.parent / checkpoint.MANIFEST).is_file():
        return find_subject(str(folder.parent), run_code=run_code)
    return Subject(model=path, recipe=None, reference=None)


def _subject_of_run(saved: Path, run: Path, *, run_code: bool) -> Subject:
    recorded = load_recorded(run / RECIPE, run_code=run_code)
    recipe = recorded.recipe
    state = json.loads((saved / STATE).read_text())
    source = state["reference"]["source"]
    start = run / START_FOLDER
    if source is None:
        source = str(start) if start.is_dir() else recipe.model.name
    elif not Path(source).is_dir() and start.is_dir():
        source = str(start)  # the run folder was moved
    # parameter names of a model with a fresh adapter differ from those without
    kind = state["reference"]["kind"]
    fresh = kind == "adapter_off" or (kind == "adapter_frozen" and not is_adapter(source))
    reference_digest = None if fresh else state["reference"]["digest"]
    return Subject(
        model=str(saved / MODEL_DIR),
        recipe=recipe,
        reference=source,
        digest=reference_digest,
        allowed=recorded.allowed,
        refused=recorded.refused,
    )


def evaluate_subject(
    subject: Subject, *, reference: str | None, prompts: str | None, task: str | None, num: int
) -> Evaluation:
    """Measure a model, and its KL to a reference where there is one."""
    initialize_vml_kernels()
    recipe = subject.recipe
    name = task or (None if recipe is None else recipe.data.task)
    eval_task = None if name is None else catalogue.find_task(name)
    suite = make_eval_suite(recipe, eval_task, num)
    if not suite.has_data and prompts is None:
        _refuse_code(subject)
        missing = "" if Path(subject.model).exists() else " (there is no such folder here)"
        raise ConfigError(
            f"{subject.model}{missing} names no data to evaluate on. Give "
            "--task (arithmetic) to measure accuracy, or --prompts FILE to measure its KL to a "
            "--reference on them."
        )
    policy = _load_policy(subject.model, recipe)
    ref_name = subject.reference if reference is None else find_subject(reference).model
    ref = None if ref_name is None else _load_policy(ref_name, recipe)
    if ref is not None and reference is None:
        _refuse_other_reference(subject, ref)
    now, before = suite.score_policy(policy), None if ref is None else suite.score_policy(ref)
    return Evaluation(
        model=subject.model,
        reference=ref_name,
        accuracy=now.accuracy,
        reference_accuracy=None if before is None else before.accuracy,
        trained=suite.trained_skill,
        reward=now.reward,
        reference_reward=None if before is None else before.reward,
        retention=None if before is None else _retained_fraction(now, before, suite.trained_skill),
        kl=None
        if ref is None
        else kl_to_reference(
            policy,
            make_reference(ref.scorer, source=str(ref_name)),
            (suite.eval_rows if prompts is None else read_rows(prompts))[:num],
            max_new_tokens=suite.max_new_tokens,
            reply=suite.reply,
        ),
    )


def _refuse_code(subject: Subject) -> None:
    """Refuse a run that can only be measured with code from its own recipe."""
    functions = without_model_code(subject.refused)
    if functions:
        raise ConfigError(
            f"{subject.model}: the recipe of this run names code ({list_code(functions)}), "
            "without which its own rows have no reward, and klinic runs no code that a run folder "
            f"names. Give {FLAG} if you trust the run's author; --prompts FILE for the KL "
            "alone, or --task arithmetic for accuracy, needs no such code."
        )


def _retained_fraction(now: EvalScores, before: EvalScores, trained: str | None) -> float | None:
    if before.accuracy and trained:
        return retained_fraction(now.accuracy, before.accuracy, trained)
    return _reward_ratio(now.retention_reward, before.retention_reward)


def _reward_ratio(now: float | None, before: float | None) -> float | None:
    return now / before if now is not None and before else None


def _load_policy(name: str, recipe: Recipe | None) -> Policy:
    temperature = 1.0 if recipe is None else recipe.sampling.temperature
    dtype = "fp32" if recipe is None else recipe.model.dtype
    remote = False if recipe is None else recipe.model.trust_remote_code
    device = "auto" if recipe is None else recipe.model.device
    section = ModelSection(name=name, dtype=dtype, trust_remote_code=remote, device=device)
    return load_policy(section, temperature=temperature, seed=0)


def _refuse_other_reference(subject: Subject, ref: Policy) -> None:
    """Refuse a reference whose digest differs from the run's."""
    if subject.digest is not None and digest(ref.lm.state_dict()) != subject.digest:
        raise CheckpointError(
            f"{subject.reference} is not the reference of the run: its digest has changed. "
            "Restore it, or name another with --reference."
        )
