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

from klinic.checks.measures import known_tokens, rms
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS, PROBES, RECIPE
from klinic.learner.packing import MicroBatch, joined, micro_batches
from klinic.loop import checkpoint
from klinic.loop.run import Run
from klinic.loop.source import Given, Source, find_source
from klinic.loop.state import LoopState
from klinic.loop.step import reward_scale
from klinic.loop.train import assemble, settle
from klinic.recipe.recipe import Recipe
from klinic.recipe.recorded import NamedCode, functions_of, load_recorded
from klinic.recipe.sampler import SamplerSection

ALONE = {"shards": 1}


class Replay:
    """A run's components with the weights from before a step."""

    def __init__(self, folder: Path, step: int, *, run_code: bool = False) -> None:
        if not (folder / RECIPE).is_file():
            raise EvidenceError(
                f"{folder} has no {RECIPE}, so its steps cannot be replayed: --prove replays "
                "runs that klinic trained. Leave --prove out for the diagnosis alone."
            )
        recorded = load_recorded(folder / RECIPE, run_code=run_code)
        self.recipe = _on_this_machine(recorded.recipe)
        self.run_code = run_code
        settle(self.recipe)
        self.folder = folder
        self.record = _read(folder, step)
        source, self.can_grade = _source(self.recipe, functions_of(recorded.refused))
        self.run: Run = assemble(self.recipe, folder, source, Console(quiet=True))
        self.learner: Any = self.run.learner
        self.replayed = self._go_to(step)

    def at(self, step: int) -> "Replay":
        """Return a replay of another step of the same run."""
        return Replay(self.folder, step, run_code=self.run_code)

    def _go_to(self, step: int) -> tuple[int, ...]:
        """Restore the weights from before a step; return the steps that were repeated."""
        found = checkpoint.newest_good(self.folder, at_most=step - 1).checkpoint
        start = 0
        if found is not None:
            self.learner.load(found.folder, found.state["learner"])
            start = found.step
        between = [s for s in store.steps(self.folder) if start < s < step]
        if len(between) < step - 1 - start:
            raise EvidenceError(
                f"{self.folder} has records of {len(between)} of the {step - 1 - start} steps "
                f"between the checkpoint of step {start} and step {step}, so it cannot be "
                "replayed. Record every step (output.records_every: 1)."
            )
        for number in between:
            self.make_again(number)
        return tuple(between)

    def make_again(self, step: int) -> None:
        """Repeat the updates of a step, starting from its initial weights."""
        self.update(_read(self.folder, step))

    def update(self, record: StepRecord, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Repeat the updates of a recorded batch."""
        scored = self.score(record)
        scale = reward_scale(self.run, LoopState(step=record.step - 1))
        metrics: dict[str, float] = {}
        for _ in range(self.recipe.learner.updates_per_batch):
            prepared = self.learner.prepare(scored, kl_coef=kl_coef(record), reward_scale=scale)
            if prepared.finite:
                metrics = self.learner.commit(lr_factor=lr_factor)
        return metrics

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of the step."""
        return kl_coef(self.record)

    def score(self, record: StepRecord) -> Any:
        """Score a recorded batch with the current weights."""
        needed = self.run.reference["kind"] != "none"
        return self.learner.score(_as_sampled(record), needs_reference=needed)

    def logp(self) -> np.ndarray:
        """Return the policy's log-probs of the step's tokens."""
        return self.score_other(self.record)

    def scored_record(self) -> StepRecord:
        """Return the record of the step as computed by this learner."""
        prepared = self.learner.prepare(self.score(self.record), kl_coef=self.kl_coef)
        self.learner.discard()
        record: StepRecord = prepared.record
        return record

    def score_other(self, record: StepRecord, *, size: int | None = None) -> np.ndarray:
        """Return the log-probs of a batch under the current weights, in micro-batches of `size`."""
        with torch.no_grad():
            scorer = self.run.policy.scorer
            batches = self.batches(record, size=size)
            return in_order([scorer(batch.layout).logp for batch in batches], batches)

    def batches(self, record: StepRecord, *, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of a record, of the learner's size or another."""
        return micro_batches(
            record,
            size=self.recipe.learner.micro_batch_size if size is None else size,
            pad_id=self.run.policy.pad_id,
            device=self.run.policy.scorer.device,
            packed=self.learner.packs,
        )

    def probe(self) -> dict[str, dict[str, Any]]:
        """Run the active probes on the step with this learner."""
        answers: dict[str, dict[str, Any]] = self.learner.probe(
            _as_sampled(self.record), kl_coef=self.kl_coef
        )
        return answers

    def told(self, question: str) -> dict[str, Any]:
        """Return the run's recorded result of a probe in the step."""
        for entry in Journal(self.folder / PROBES).entries():
            if entry.get("step") == self.record.step and entry.get("probe") == question:
                return entry
        return {}

    def metric(self, name: str) -> float:
        """Return a logged metric of the step."""
        for entry in Journal(self.folder / METRICS).entries():
            if entry.get("step") == self.record.step and entry.get(name) is not None:
                return float(entry[name])
        raise EvidenceError(f"{self.folder} has no metric {name} of step {self.record.step}.")

    def apart(self) -> float | None:
        """Return the difference of the replay's log-probs from the recorded ones, in nats."""
        if self.record.logp_old is None:
            return None
        known = known_tokens(self.record, "logp_old")
        return rms((self.logp() - self.record.logp_old)[known])

    @contextmanager
    def temperature(self, value: float) -> Iterator[None]:
        """Score at another temperature within the context."""
        scorer = self.run.policy.scorer
        before, scorer.temperature = scorer.temperature, value
        try:
            yield
        finally:
            scorer.temperature = before


def in_order(parts: Sequence[Tensor], batches: Sequence[MicroBatch]) -> np.ndarray:
    """Return a record column from per-micro-batch values."""
    whole = joined(parts, batches, sum(len(part) for part in parts))
    return np.asarray(whole.double().cpu().numpy())


def kl_coef(record: StepRecord) -> float:
    """Return the KL coefficient of a recorded step: a controller may have changed it since."""
    return float(record.facts.get("kl_coef") or 0.0)


def _on_this_machine(recipe: Recipe) -> Recipe:
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
            "learner": recipe.learner.model_copy(update=ALONE),
            "cluster": cluster,
        }
    )


def _source(recipe: Recipe, refused: Sequence[NamedCode]) -> tuple[Source, bool]:
    """Return the run's dataset and rewards and True; placeholders and False if unavailable.

    Rewards passed as Python functions are not recorded, and named ones may not be allowed to run.
    """
    try:
        if not refused:
            return find_source(recipe, Given()), True
    except ConfigError:
        pass
    rows = [{"prompt": f"{n}?"} for n in range(recipe.loop.prompts_per_step)]
    return find_source(recipe, Given(reward_functions=[handed_over], rows=rows)), False


def handed_over(prompts: list[str], completions: list[str], **columns: Any) -> list[None]:  # noqa: ARG001
    """Stand in for reward functions that a recipe does not name; a replay uses recorded rewards."""
    return [None] * len(completions)


def _read(folder: Path, step: int) -> StepRecord:
    """Return a record with writable arrays, as torch requires."""
    record = store.read_record(folder, step)
    arrays = {f.name: getattr(record, f.name) for f in fields(record)}
    own: dict[str, Any] = {n: np.array(a) for n, a in arrays.items() if isinstance(a, np.ndarray)}
    return replace(record, **own)


def _as_sampled(record: StepRecord) -> StepRecord:
    """Return a record without the learner's columns."""
    return replace(
        record, logp=None, logp_old=None, logp_ref=None, entropy=None, rank=None, kl_exact=None
    )
