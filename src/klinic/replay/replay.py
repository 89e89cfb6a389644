"""Replay a step of a run from the nearest earlier checkpoint, on the recorded tokens.

Recorded tokens, rewards and advantages are passed to the learner unchanged; the updates between the
checkpoint and the step are repeated. Fidelity is measured: the replay's log-probs against the
recorded ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from klinic.checks.measures import finite_trained_tokens, rms
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import ProbeResult, StepRecord
from klinic.evidence.run_facts import METRICS, PROBES, RECIPE
from klinic.learner.local import LocalLearner
from klinic.learner.packing import MicroBatch, gather_tokens
from klinic.learner.protocol import Learner, LossScales
from klinic.learner.scored_batch import ScoredBatch
from klinic.recipe.recipe import Recipe
from klinic.recipe.recorded import NamedCode, load_recorded, without_model_code
from klinic.recipe.sections import SamplerSection
from klinic.training import checkpoint
from klinic.training.run import Run
from klinic.training.source import PythonInputs, TaskData, load_task_data
from klinic.training.state import LoopState
from klinic.training.step import reward_scale
from klinic.training.train import assemble_run, make_deterministic

UNSHARDED = {"shards": 1, "replicas": 1}

BeforeAfter = tuple[float, float]
"""A quantity before and after."""


class Replay:
    """A run's components with the weights from before a step."""

    def __init__(self, folder: Path, step: int, *, run_code: bool = False) -> None:
        if not (folder / RECIPE).is_file():
            raise EvidenceError(
                f"{folder} has no {RECIPE}, so its steps cannot be replayed: --prove replays "
                "runs that klinic trained. Leave --prove out for the diagnosis alone."
            )
        recorded = load_recorded(folder / RECIPE, run_code=run_code)
        self.recipe = _single_process_recipe(recorded.recipe)
        self.run_code = run_code
        make_deterministic(self.recipe)
        self.folder = folder
        self.record = _read_writable(folder, step)
        source, self.can_grade = _find_run_source(self.recipe, without_model_code(recorded.refused))
        self.run: Run = assemble_run(self.recipe, folder, source, Console(quiet=True))
        self.learner = _local_learner(self.run.learner)
        self.replayed = self._restore_before(step)

    def at_step(self, step: int) -> "Replay":
        """Return a replay of another step of the same run."""
        return Replay(self.folder, step, run_code=self.run_code)

    def _restore_before(self, step: int) -> tuple[int, ...]:
        """Restore the weights from before a step; return the steps that were repeated."""
        restored = checkpoint.newest_valid(self.folder, max_step=step - 1).checkpoint
        start = 0
        if restored is not None:
            self.learner.load(restored.folder, restored.state["learner"])
            start = restored.step
        between = [s for s in store.complete_steps(self.folder) if start < s < step]
        if len(between) < step - 1 - start:
            raise EvidenceError(
                f"{self.folder} has records of {len(between)} of the {step - 1 - start} steps "
                f"between the checkpoint of step {start} and step {step}, so it cannot be "
                "replayed. Record every step (output.records_every: 1)."
            )
        for number in between:
            self.repeat_step(number)
        return tuple(between)

    def repeat_step(self, step: int) -> None:
        """Repeat the updates of a step, starting from its initial weights."""
        self.repeat_updates(_read_writable(self.folder, step))

    def repeat_updates(self, record: StepRecord, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Repeat the updates of a recorded batch."""
        scored = self.score_recorded(record)
        scales = LossScales(
            kl_coef=recorded_kl_coef(record),
            reward=reward_scale(self.run, LoopState(step=record.step - 1)),
        )
        metrics: dict[str, float] = {}
        for _ in range(self.recipe.learner.updates_per_batch):
            prepared = self.learner.prepare(scored, scales)
            if prepared.is_finite:
                metrics = self.learner.commit(lr_factor=lr_factor)
        return metrics

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of the step."""
        return recorded_kl_coef(self.record)

    def score_recorded(self, record: StepRecord) -> ScoredBatch:
        """Score a recorded batch with the current weights."""
        needed = self.run.parts.reference["kind"] != "none"
        return self.learner.score(_without_learner_columns(record), needs_reference=needed)

    def current_logp(self) -> np.ndarray:
        """Return the policy's log-probs of the step's tokens."""
        return self.score_tokens(self.record)

    def scored_record(self) -> StepRecord:
        """Return the record of the step as computed by this learner."""
        scored = self.score_recorded(self.record)
        prepared = self.learner.prepare(scored, LossScales(kl_coef=self.kl_coef))
        self.learner.discard()
        return prepared.record

    def score_tokens(self, record: StepRecord, *, size: int | None = None) -> np.ndarray:
        """Return the log-probs of a batch under the current weights, in micro-batches of `size`."""
        with torch.no_grad():
            scorer = self.run.parts.policy.scorer
            batches = self.micro_batches(record, size=size)
            return concat_in_order([scorer(batch.layout).logp for batch in batches], batches)

    def micro_batches(self, record: StepRecord, *, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of a record, of the learner's size or another."""
        default_size = self.recipe.learner.micro_batch_size
        return self.learner.make_micro_batches(record, default_size if size is None else size)

    def run_probes(self) -> dict[str, ProbeResult]:
        """Run the active probes on the step with this learner."""
        return self.learner.probe(_without_learner_columns(self.record), kl_coef=self.kl_coef)

    def recorded_probe(self, probe: str) -> dict[str, Any]:
        """Return the run's recorded result of a probe in the step."""
        for entry in Journal(self.folder / PROBES).entries():
            if entry.get("step") == self.record.step and entry.get("probe") == probe:
                return entry
        return {}

    def logged_metric(self, name: str) -> float:
        """Return a logged metric of the step."""
        for entry in Journal(self.folder / METRICS).entries():
            if entry.get("step") == self.record.step and entry.get(name) is not None:
                return float(entry[name])
        raise EvidenceError(f"{self.folder} has no metric {name} of step {self.record.step}.")

    def logp_difference(self) -> float | None:
        """Return the difference of the replay's log-probs from the recorded ones, in nats."""
        if self.record.logp_old is None:
            return None
        is_known = finite_trained_tokens(self.record, "logp_old")
        return rms((self.current_logp() - self.record.logp_old)[is_known])

    @contextmanager
    def at_temperature(self, value: float) -> Iterator[None]:
        """Score at another temperature within the context."""
        scorer = self.run.parts.policy.scorer
        before, scorer.temperature = scorer.temperature, value
        try:
            yield
        finally:
            scorer.temperature = before


def _local_learner(learner: Learner) -> LocalLearner:
    if not isinstance(learner, LocalLearner):
        raise TypeError(f"a replay runs in one process, but the learner is {type(learner)}")
    return learner


def concat_in_order(parts: Sequence[Tensor], batches: Sequence[MicroBatch]) -> np.ndarray:
    """Return a record column from per-micro-batch values."""
    whole = gather_tokens(parts, batches, sum(len(part) for part in parts))
    return np.asarray(whole.double().cpu().numpy())


def recorded_kl_coef(record: StepRecord) -> float:
    """Return the KL coefficient of a recorded step: a controller may have changed it since."""
    return float(record.facts.get("kl_coef") or 0.0)


def _single_process_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe for one process, without engine, trackers or a remote Ray cluster.

    The tokens are recorded, and gradients do not depend on these.
    """
    cluster = recipe.cluster
    if cluster is not None:  # the loss depends on cluster.max_staleness
        alone = {"address": None, "samplers": 1, "reward_workers": 0}
        cluster = cluster.model_copy(update=alone) if cluster.max_staleness else None
    return recipe.model_copy(
        update={
            "output": recipe.output.model_copy(update={"trackers": (), "doctor": "none"}),
            "sampler": SamplerSection(),
            "model": recipe.model.model_copy(update={"device": "auto"}),
            "learner": recipe.learner.model_copy(update=UNSHARDED),
            "cluster": cluster,
        }
    )


def _find_run_source(recipe: Recipe, refused: Sequence[NamedCode]) -> tuple[TaskData, bool]:
    """Return the run's dataset and rewards and True; placeholders and False if unavailable.

    Rewards passed as Python functions are not recorded, and named ones may not be allowed to run.
    """
    try:
        if not refused:
            return load_task_data(recipe, PythonInputs()), True
    except ConfigError:
        pass
    rows = [{"prompt": f"{n}?"} for n in range(recipe.loop.prompts_per_step)]
    return load_task_data(
        recipe, PythonInputs(reward_functions=[placeholder_reward], rows=rows)
    ), False


def placeholder_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[None]:  # noqa: ARG001
    """Stand in for reward functions that a recipe does not name; a replay uses recorded rewards."""
    return [None] * len(completions)


def _read_writable(folder: Path, step: int) -> StepRecord:
    """Return a record with writable arrays, as torch requires."""
    record = store.read_record(folder, step)
    arrays = {f.name: getattr(record, f.name) for f in fields(record)}
    writable: dict[str, Any] = {
        n: np.array(a) for n, a in arrays.items() if isinstance(a, np.ndarray)
    }
    return replace(record, **writable)


def _without_learner_columns(record: StepRecord) -> StepRecord:
    """Return a record without the learner's columns."""
    return replace(
        record, logp=None, logp_old=None, logp_ref=None, entropy=None, rank=None, kl_exact=None
    )
