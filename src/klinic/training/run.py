"""A training run: implements the loop's protocol, and records, evaluates and saves every step."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klinic.data.prompts import PromptDataset
from klinic.doctor.anomalies import non_finite
from klinic.doctor.live import DIAGNOSIS_EVENT, DoctorCheckpoint, RunDoctor
from klinic.doctor.warning_signs import (
    EvalSetup,
    WarningState,
    WarningUpdate,
    kl_limits,
    watch_retention,
    watch_step,
)
from klinic.errors import LogitsError, LostError, RunStoppedError, error_text
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout, flatten_rollouts
from klinic.evidence.run_facts import EVENTS, METRICS, PROBES, display_path
from klinic.evidence.writing import write_durably
from klinic.learner.checkpoint import MODEL_DIR
from klinic.learner.protocol import Learner, RecordSink
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe
from klinic.report.model_card import CARD_NAME, CardFacts, model_card
from klinic.rewards.runner import score
from klinic.rewards.scores import (
    StepRewards,
    add_overlong_penalty,
    overlong_penalty,
    reward_statistics,
    select_scores,
    with_rewards,
)
from klinic.sampler.protocol import Sampler
from klinic.trackers.protocol import Tracker
from klinic.training import checkpoint, probes
from klinic.training.checkpoint import RunIdentity, RunSnapshot
from klinic.training.collect import RolloutBatch
from klinic.training.guards import StepAnomalyError, StepGuard
from klinic.training.recovery import (
    DECISION_EVENTS,
    TRANSIENT_EVENT,
    TRANSIENT_MESSAGE,
    RecoveryManager,
    anomaly_event,
)
from klinic.training.run_folder import RESTARTED_EVENT, entry_step, folder_identity, refuse_moved
from klinic.training.signals import StopSignal
from klinic.training.source import TaskData
from klinic.training.state import CompletedStep, LoopState
from klinic.training.step_metrics import add_update_facts, all_step_metrics

if TYPE_CHECKING:
    from klinic.training.ray_run import RayWorkers

SYNC_GAP_KEYS = ("repeated", "fresh")
PERSISTENT_EVENTS = DECISION_EVENTS | {RESTARTED_EVENT}
"""Events that a rollback keeps, because they explain it."""


@dataclass(kw_only=True)
class Run:
    """The assembled run of a recipe."""

    recipe: Recipe
    folder: Path
    task_data: TaskData
    policy: Policy
    learner: Learner
    sampler: Sampler
    prompt_dataset: PromptDataset
    trackers: list[Tracker]
    reference: dict[str, Any]
    """Kind, source and digest of the reference at the start; the learner has its current state."""
    base_digest: str | None
    """Digest of the base weights under an adapter, which checkpoints do not contain."""
    cluster: "RayWorkers | None" = None
    """Worker processes, if there are any."""
    stop_signal: StopSignal = field(default_factory=StopSignal)
    initial_eval: dict[str, float] | None = None
    """Held-out metrics before the first step."""
    signs: WarningState = field(default_factory=WarningState)
    """State of the warning signs."""
    _reward_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folder_identity = folder_identity(self.folder)
        self._display_folder = display_path(self.folder, self.recipe)
        self.max_steps = self.recipe.loop.max_steps
        self.updates_per_batch = self.recipe.learner.updates_per_batch
        self.reward_warmup_steps = self.recipe.learner.reward_warmup_steps
        self.extra_rounds = self.recipe.loop.extra_rounds
        self.recovery = RecoveryManager(self.folder, self.recipe.recovery)
        limits = self.recovery.limits
        self.update_kl_limit = None if limits is None else limits.update_kl
        self.reference_rule = self.recipe.reference
        self.doctor = RunDoctor(
            self.folder,
            self.recipe.output.doctor,
            self.record_event,
            display_folder=self._display_folder,
        )
        self.metrics_log = Journal(self.folder / METRICS)
        self.event_log = Journal(self.folder / EVENTS)
        self.probe_log = Journal(self.folder / PROBES)
        self._exit_stack = ExitStack()
        self._record_writer: RecordSink | None = None
        self._sync_probe: dict[str, Any] = {}
        self._reward_lock = threading.Lock()
        self._last_step = 0
        self._latest_metrics: tuple[int, dict[str, float]] = (0, {})
        """A step and its metrics, for the model card of a checkpoint."""
        self._doctor_checkpoint: DoctorCheckpoint | None = None
        """The doctor's part of the checkpoint that was restored last."""
        self.probe_results: dict[str, dict[str, Any]] = {}
        """Probe results of this step, by probe."""

    def __enter__(self) -> "Run":
        self._exit_stack.enter_context(self.stop_signal)
        if self.cluster is not None:
            self._exit_stack.callback(self.cluster.close)
        self._exit_stack.callback(self.learner.close)
        self._exit_stack.callback(self.sampler.close)
        if self.recipe.output.records_every:
            self._record_writer = self._exit_stack.enter_context(
                self.learner.open_records(self.folder)
            )
        for tracker in self.trackers:
            self._exit_stack.callback(tracker.close)
        for reward in self.task_data.all_rewards:
            self._exit_stack.callback(reward.close)
        return self

    def __exit__(self, *error: Any) -> None:
        # a lost worker may be the reason for the exit
        self._record_cluster_messages(self._last_step)
        self._exit_stack.__exit__(*error)

    def make_guard(self, state: LoopState) -> StepGuard:
        """Return the guard of the next step."""
        return StepGuard(
            self.recovery.limits,
            state.history,
            tolerated_sites=self.recovery.plan.known,
            expected_batch=self.next_batch_index(state.batch_index),
        )

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        return self.recovery.plan.lr_factor(step)

    def next_batch_index(self, batch_index: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""
        return self.recovery.plan.next_batch_index(batch_index)

    def recover(self, step_anomaly: StepAnomalyError, state: LoopState) -> LoopState:
        """Handle an anomaly; return the state to continue from, or raise to stop."""
        step, anomaly = state.step + 1, step_anomaly.anomaly
        decision = self.recovery.decide(step_anomaly, state.history, step=step)
        self.event_log.append(anomaly_event(step, decision, step_anomaly))
        back_to = decision.plan.back_to
        if back_to is not None:
            state = self.roll_back(back_to)
        else:
            self._discard_attempt(state.step)
        self._log_message(step, decision.says)  # after trackers are rewound
        if decision.act == "stop":
            if not anomaly.damaged:
                self.save(state)
            raise RunStoppedError(f"{self._display_folder}: {decision.says}")
        return state

    def write_lost_decision(self) -> None:
        """Copy the last recovery decision to the events if a kill prevented that."""
        decided = self.recovery.event
        made = [entry for entry in self.event_log.entries() if entry["event"] in DECISION_EVENTS]
        if decided is not None and made[-1:] != [decided]:
            self.event_log.append(decided)

    def _discard_attempt(self, step: int) -> None:
        """Discard probes and events of a failed attempt, as a resumed run would."""
        self.probe_log.rewind(lambda entry: entry.get("step", 0) <= step)
        persistent = PERSISTENT_EVENTS | {DIAGNOSIS_EVENT}
        self.event_log.rewind(
            lambda entry: entry.get("step", 0) <= step or entry["event"] in persistent
        )

    def roll_back(self, step: int) -> LoopState:
        """Roll back to a checkpoint, or the one before if it is broken, and discard later data."""
        if self._record_writer is not None:
            self._record_writer.flush()
        state, problems = self._restore_finite(step)
        checkpoint.set_aside_damaged(self.folder, after=state.step, max_step=step)
        self.discard_after(state.step)
        for problem in problems:
            self.record_event(state.step, "broken checkpoint", f"{problem} Using the one before.")
        for tracker in self.trackers:
            tracker.rewind(state.step)
        self.recovery.finish_rollback()
        self.doctor.restart_after(state.step, self._doctor_checkpoint)
        return state

    def open_doctor(self, *, after: int) -> None:
        """Start checking the steps after `after`; requires run.json."""
        self.doctor.start_after(after=after, saved=self._doctor_checkpoint)
        self._exit_stack.callback(self.doctor.close)

    def _restore_finite(self, step: int) -> tuple[LoopState, list[str]]:
        """Restore the newest checkpoint, at most of `step`, that is valid and finite."""
        problems: list[str] = []
        while True:
            search = checkpoint.newest_valid(self.folder, max_step=step)
            problems += search.broken
            if search.checkpoint is None:
                raise RunStoppedError(
                    f"{self._display_folder}: no valid checkpoint is left to roll back to."
                )
            state = self.restore(search.checkpoint)
            if all(self.learner.all_finite().values()):
                return state, problems
            problems.append(f"{search.checkpoint.folder} holds non-finite values.")
            step = state.step - 1

    def discard_after(self, step: int) -> None:
        """Discard metrics, records and checkpoints of later steps; recovery decisions stay."""
        checkpoint.remove_after(self.folder, step)
        store.remove_records_after(self.folder, step)
        self.metrics_log.rewind(lambda entry: entry_step(entry, self.folder) <= step)
        self.probe_log.rewind(lambda entry: entry.get("step", 0) <= step)
        self.event_log.rewind(lambda entry: self._survives_rollback(entry, step))

    def _survives_rollback(self, entry: Mapping[str, Any], step: int) -> bool:
        """Whether an event survives a rollback to a step."""
        if entry["event"] in PERSISTENT_EVENTS or entry.get("step", 0) < step:
            return True
        saved = self._doctor_checkpoint
        if entry["event"] == DIAGNOSIS_EVENT and saved is not None:
            # the diagnosis of the checkpoint's own step is reported after the save
            return entry.get("step", 0) == step and entry.get("cause") in saved.state["named"]
        return bool(entry.get("step", 0) <= step)

    def prompt_batch(self, batch_index: int) -> list[Prompt]:
        """Return a batch of prompts."""
        return self.prompt_dataset.batch_at(batch_index)

    def score_rollouts(self, rollouts: list[Rollout]) -> StepRewards:
        """Return the rewards of completions, with the overlong penalty if it is enabled."""
        with self._reward_lock:  # the prefetch thread computes rewards too
            scores = self._call_rewards(rollouts)
        buffer = self.recipe.learner.overlong_buffer
        if not buffer:
            return scores
        lengths = np.array([rollout.num_policy_tokens for rollout in rollouts])
        limit = self.recipe.sampling.max_new_tokens
        return add_overlong_penalty(scores, overlong_penalty(lengths, limit=limit, buffer=buffer))

    def _call_rewards(self, rollouts: list[Rollout]) -> StepRewards:
        if self.cluster is not None and self.cluster.section.reward_workers:
            return self.cluster.score_rollouts(rollouts)
        return score(rollouts, self.task_data.rewards)

    def make_record(self, batch: RolloutBatch, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""
        self._reward_metrics = reward_statistics(batch.scores) | self._parse_rate(batch.rollouts)
        if self.extra_rounds:
            self._reward_metrics["sampling/rounds"] = float(len(batch.batch_indices))
            self._reward_metrics["sampling/groups_dropped"] = float(batch.num_dropped_groups)
        rollouts = [batch.rollouts[row] for row in batch.chosen]
        record = flatten_rollouts(rollouts, step=step)
        if self.doctor.is_probe_due(step):
            round_trips = probes.check_round_trips(self.policy.tokenizer, rollouts)
            record = replace(record, round_trip=round_trips)
        scores = select_scores(batch.scores, batch.chosen)
        return with_rewards(record, scores, advantage=self.recipe.learner.advantage)

    def record_sync(self, probe_result: Mapping[str, Any], step: int) -> None:
        """Record the sync probe, and report a faulty sync before sampling or training on it."""
        self._sync_probe = dict(probe_result)
        if not probe_result:
            return
        self.probe_log.append({"step": step, "probe": "sampler_sync", **probe_result})
        self.doctor.report_sync(probe_result, step, self.recipe.model.dtype)

    def run_probes(self, batch: RolloutBatch, record: StepRecord, kl_coef: float) -> None:
        """Run the active probes if they are due, and write their results to probes.jsonl."""
        self.probe_results = {"sampler_sync": self._sync_probe} if self._sync_probe else {}
        if not self.doctor.is_probe_due(record.step):
            return
        try:
            answers = self.learner.probe(record, kl_coef=kl_coef)
            if self.task_data.task is not None:
                rollouts = [batch.rollouts[row] for row in batch.chosen]
                answers["regrade"] = probes.regrade_completions(
                    self.task_data.task, rollouts, record, self.score_rollouts
                )
        except LostError:
            raise
        except Exception as error:  # a failing probe must never end a run
            reason = f"{type(error).__name__}: {error_text(error)}"
            self.record_event(record.step, "probe failed", f"A probe failed: {reason}")
            return
        self.probe_results |= answers
        for name, answer in answers.items():
            self.probe_log.append({"step": record.step, "probe": name, **answer})

    def _parse_rate(self, rollouts: list[Rollout]) -> dict[str, float]:
        task = self.task_data.task
        if task is None:
            return {}
        parsed = [task.parse(probes.dataset_row(r), r.text) is not None for r in rollouts]
        return {"completions/parse_rate": sum(parsed) / len(parsed)}

    def record_step(self, completed: CompletedStep, state: LoopState) -> bool:
        """Record a step; return whether to continue."""
        refuse_moved(self.folder, self._folder_identity)
        # read once: a later signal stops after the next step
        stop_requested = self.stop_signal.is_requested
        metrics = self.collect_metrics(completed)
        self.metrics_log.append({"step": completed.step, **metrics})
        self._last_step, self._latest_metrics = completed.step, (completed.step, metrics)
        self._log_step(completed, metrics)
        self._record_cluster_messages(completed.step)
        every = self.recipe.output.records_every
        if self._record_writer is not None and (completed.step - 1) % every == 0:
            self._record_writer.put(add_update_facts(completed, metrics))
        if completed.num_discarded:
            self.event_log.append(
                {"step": completed.step, "event": "discarded", "num": completed.num_discarded}
            )
        if self.recovery.confirm_transient(completed.step, completed.batch_indices):
            self.record_event(completed.step, TRANSIENT_EVENT, TRANSIENT_MESSAGE)
        self._record_warning_signs(
            completed.step, watch_step(self.signs, metrics, kl_limits(self.recipe.kl))
        )
        last = completed.step == self.max_steps
        self.doctor.submit_step(add_update_facts(completed, metrics), metrics, self.probe_results)
        if _is_due(self.recipe.loop.eval_every, completed.step) or last:
            self.evaluate(completed.step)
        if _is_due(self.recipe.loop.checkpoint_every, completed.step) or last or stop_requested:
            self._refuse_non_finite(completed, metrics)
            self.save(state)
        if last or stop_requested:
            self.doctor.report_diagnosis(completed.step)
        return not stop_requested

    def collect_metrics(self, completed: CompletedStep) -> dict[str, float]:
        """Return every metric of a step by name."""
        sync_gaps = {
            f"sampling/sync_gap_{key}": self._sync_probe[key]
            for key in SYNC_GAP_KEYS
            if key in self._sync_probe
        }
        return all_step_metrics(completed, self._reward_metrics, self.recipe.learner) | sync_gaps

    def _refuse_non_finite(self, completed: CompletedStep, metrics: Mapping[str, float]) -> None:
        """Refuse to checkpoint non-finite weights or optimizer moments."""
        anomaly = non_finite(self.learner.all_finite(), damaged=True)
        if anomaly is None:
            return
        if self.recovery.limits is None:
            raise RunStoppedError(
                f"{self._display_folder}: {anomaly} at step "
                f"{completed.step}, and recovery is null. The "
                "step was not saved: continue from the newest checkpoint with --resume recovery={}."
            )
        raise StepAnomalyError(anomaly, completed.batch_indices, dict(metrics))

    def _record_cluster_messages(self, step: int) -> None:
        while self.cluster is not None and self.cluster.messages:
            self.record_event(step, "cluster", self.cluster.messages.popleft())

    def _log_step(self, completed: CompletedStep, metrics: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log_metrics(completed.step, metrics)
            if _is_due(self.recipe.loop.show_completions_every, completed.step):
                tracker.log_completions(completed.step, completed.rollouts, completed.record)

    def record_event(self, step: int, name: str, message: str, **facts: Any) -> None:
        """Record an event, and send its message to all trackers."""
        self.event_log.append({"step": step, "event": name, "says": message, **facts})
        self._log_message(step, message)

    def _log_message(self, step: int, message: str) -> None:
        for tracker in self.trackers:
            tracker.log_message(step, message)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy on held-out rows, and log the metrics."""
        self.learner.publish()  # with sharded weights, the policy here is a copy
        metrics = self._evaluate_with_retry(step)
        if metrics:
            self.metrics_log.append({"step": step, **metrics})
            self._latest_metrics = (step, {**self._metrics_at(step), **metrics})
            self.doctor.add_metrics(step, metrics)
            for tracker in self.trackers:
                tracker.log_metrics(step, metrics)
            before = self.initial_eval or {}
            self._record_warning_signs(
                step, watch_retention(self.signs, metrics, before, self._retention_exam())
            )
        return metrics

    def _evaluate_with_retry(self, step: int) -> dict[str, float]:
        """Evaluate, with one retry; the next step's guard handles a non-finite policy."""
        for _ in range(2):
            try:
                return self.task_data.evaluate(self.policy, self.recipe, self.initial_eval)
            except LogitsError:
                self.record_event(step, "evaluation failed", "Non-finite logits in an evaluation.")
        return {}

    def _retention_exam(self) -> EvalSetup:
        num, retention_set = self.recipe.loop.eval_prompts, self.task_data.retention_set
        return EvalSetup(
            num=num if retention_set is None else min(num, len(retention_set.rows)),
            trained=self.task_data.skill,
        )

    def _record_warning_signs(self, step: int, watched: WarningUpdate) -> None:
        self.signs = watched.signs
        for sign in watched.new:
            self.record_event(step, sign.name, sign.sentence, **sign.facts)

    def save(self, state: LoopState) -> Path:
        """Write a checkpoint of the learner, the loop state and the doctor."""
        if self._record_writer is not None:
            self._record_writer.flush()  # a resumed run does not write earlier records again

        def write_contents(folder: Path) -> dict[str, Any]:
            learner = self.learner.save(folder)
            card = model_card(self._card_facts(state, learner))
            write_durably(folder / MODEL_DIR / CARD_NAME, card.encode("utf-8", "backslashreplace"))
            doctor = self.doctor.save(folder)
            saved = RunSnapshot(
                state=state, initial_eval=self.initial_eval, signs=self.signs, doctor=doctor
            )
            return saved.to_json(self._run_identity, learner, self.recipe.seed)

        num_kept = self.recipe.loop.keep_checkpoints
        protected_step = self.recovery.protected_checkpoint(state.history)
        return checkpoint.write_checkpoint(
            self.folder,
            state.step,
            write_contents=write_contents,
            num_kept=num_kept,
            protected_step=protected_step,
        )

    def _card_facts(self, state: LoopState, learner: Mapping[str, Any]) -> CardFacts:
        named = [e for e in self.event_log.entries() if e["event"] == DIAGNOSIS_EVENT]
        return CardFacts(
            recipe=self.recipe,
            step=state.step,
            kl_coef=None if state.kl is None else state.kl.coef,
            reference={**self.reference, **learner.get("reference", {})},
            metrics=self._metrics_at(state.step),
            causes=[(e["step"], e["cause"]) for e in named] if self.doctor.is_enabled else None,
        )

    def _metrics_at(self, step: int) -> dict[str, float]:
        latest, metrics = self._latest_metrics
        return metrics if latest == step else {}

    def restore(self, saved: checkpoint.Checkpoint) -> LoopState:
        """Restore a checkpoint of this run."""
        self._run_identity.refuse_other_run(saved)
        self.learner.load(saved.folder, saved.state["learner"])
        snapshot = RunSnapshot.from_checkpoint(saved)
        self.initial_eval, self.signs = snapshot.initial_eval, snapshot.signs
        doctor = snapshot.doctor
        self._doctor_checkpoint = (
            None if doctor is None else DoctorCheckpoint(state=doctor, folder=saved.folder)
        )
        return snapshot.state

    @property
    def _run_identity(self) -> RunIdentity:
        return RunIdentity(
            reference=self.reference,
            base_digest=self.base_digest,
            data_digest=self.prompt_dataset.digest,
        )


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
