"""A training run: implements the loop's protocol, and records, evaluates and saves every step."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from klinic.doctor.anomalies import non_finite
from klinic.doctor.live import RunDoctor
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
from klinic.evidence.record import ProbeResult, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, flatten_rollouts
from klinic.evidence.step_sample import sample_record
from klinic.learner.protocol import RecordSink
from klinic.model.chat import PromptEncoder
from klinic.rewards.answer_pay import count_paid_answers
from klinic.rewards.runner import score
from klinic.rewards.scores import (
    StepRewards,
    add_overlong_penalty,
    overlong_penalty,
    remove_rewards,
    reward_statistics,
    with_rewards,
)
from klinic.sampler.protocol import LoadResult, release_sampler_memory
from klinic.training import checkpoint, probes
from klinic.training.callbacks import CallbackWishes
from klinic.training.checkpoint import Checkpoint
from klinic.training.collect import RolloutBatch
from klinic.training.evaluation import complete_rows
from klinic.training.guards import StepAnomalyError, StepGuard
from klinic.training.parts import RunParts
from klinic.training.published_run import Publishing
from klinic.training.record_budget import RecordKeeper
from klinic.training.recovery import (
    TRANSIENT_EVENT,
    TRANSIENT_MESSAGE,
    RecoveryManager,
    anomaly_event,
)
from klinic.training.run_checkpoints import RunCheckpoints, RunState
from klinic.training.run_folder import folder_identity, refuse_moved
from klinic.training.run_log import RunLog
from klinic.training.signals import StopSignal
from klinic.training.state import CompletedStep, EventFacts, LoopState
from klinic.training.step_metrics import add_update_facts, all_step_metrics, doctor_record

SYNC_GAP_KEYS = ("repeated", "fresh")


class Run:
    """A run of a recipe: its parts, log and checkpoints, its doctor and its recovery."""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.recipe, self.learner, self.sampler = parts.recipe, parts.learner, parts.sampler
        self.sampler_lock: AbstractContextManager[bool] = threading.RLock()
        self.stop_signal = StopSignal()
        self.log = RunLog(parts.folder, parts.trackers)
        self.recovery = RecoveryManager(parts.folder, parts.recipe.recovery)
        self.doctor = RunDoctor(
            parts.folder,
            parts.recipe.output.doctor,
            self.log.record_event,
            display_folder=parts.display_folder,
            select=sample_record if parts.recipe.learner.num_ranks > 1 else None,
        )
        self.record_keeper = RecordKeeper(
            parts.folder, parts.recipe.output.keep_records, self.log.events.append
        )
        self.checkpoints = RunCheckpoints(parts, self.log, self.recovery, self.doctor)
        self.publishing = Publishing(None)
        self.initial_eval: dict[str, float] | None = None
        """Held-out metrics before the first step."""
        self.signs = WarningState()
        """State of the warning signs."""
        self.probe_results: dict[str, ProbeResult] = {}
        """Probe results of this step, by probe."""
        self._folder_identity = folder_identity(parts.folder)
        self._exit_stack = ExitStack()
        self._record_writer: RecordSink | None = None
        self._sync_probe: ProbeResult = {}
        self._reward_lock = threading.Lock()
        self._reward_metrics: dict[str, float] = {}
        self._last_step = 0
        self._callbacks = parts.task_data.inputs.callbacks
        self._stop_wished = False
        self._latest_metrics: tuple[int, dict[str, float]] = (0, {})
        """A step and its metrics, for the model card of a checkpoint."""

    def __enter__(self) -> "Run":
        parts, stack = self.parts, self._exit_stack
        stack.enter_context(self.stop_signal)
        stack.callback(self.record_keeper.close)
        if parts.cluster is not None:
            stack.callback(parts.cluster.close)
        stack.callback(parts.learner.close)
        stack.callback(parts.sampler.close)
        if parts.recipe.output.records_every:
            self._record_writer = stack.enter_context(parts.learner.open_records(parts.folder))
        for tracker in parts.trackers:
            stack.callback(tracker.close)
        for reward in parts.task_data.all_rewards:
            stack.callback(reward.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # a lost worker may be the reason for the exit
        self._record_cluster_messages(self._last_step)
        self._exit_stack.__exit__(kind, error, traceback)

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
        self.log.events.append(anomaly_event(step, decision, step_anomaly))
        back_to = decision.plan.back_to
        if back_to is not None:
            state = self.roll_back(back_to)
        else:
            self.log.discard_attempt(state.step)
        self.log.log_message(step, decision.says)  # after trackers are rewound
        if decision.act == "stop":
            if not anomaly.damaged:
                self.save(state)
            raise RunStoppedError(f"{self.parts.display_folder}: {decision.says}")
        return state

    def roll_back(self, step: int) -> LoopState:
        """Roll back to a checkpoint, or the one before if it is broken, and discard later data."""
        if self._record_writer is not None:
            self._record_writer.flush()
        self.publishing.wait(step)
        self.record_keeper.forget()
        run_state, problems = self.checkpoints.restore_finite(step)
        state = self._adopt_state(run_state)
        checkpoint.set_aside_damaged(self.parts.folder, after=state.step, max_step=step)
        self.discard_after(state.step)
        for problem in problems:
            self.record_event(state.step, "broken checkpoint", f"{problem} Using the one before.")
        self.log.rewind_trackers(state.step)
        self.recovery.finish_rollback()
        self.doctor.restart_after(state.step, self.checkpoints.doctor_state)
        return state

    def open_doctor(self, *, after: int) -> None:
        """Start checking the steps after `after`; requires run.json."""
        self.doctor.start_after(after=after, saved=self.checkpoints.doctor_state)
        self._exit_stack.callback(self.doctor.close)

    def discard_after(self, step: int) -> None:
        """Discard metrics, records and checkpoints of later steps; recovery decisions stay."""
        checkpoint.remove_after(self.parts.folder, step)
        store.remove_records_after(self.parts.folder, step)
        self.log.discard_after(step, self.checkpoints.named_causes)

    def prompt_batch(self, batch_index: int) -> list[Prompt]:
        """Return a batch of prompts."""
        return self.parts.prompt_dataset.batch_at(batch_index)

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
        cluster = self.parts.cluster
        if cluster is not None and cluster.section.reward_workers:
            return cluster.score_rollouts(rollouts)
        return score(rollouts, self.parts.task_data.rewards)

    def make_record(self, batch: RolloutBatch, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""
        self._reward_metrics = reward_statistics(batch.scores) | self._parse_rate(batch.rollouts)
        if self.recipe.loop.extra_rounds:
            self._reward_metrics["sampling/rounds"] = float(len(batch.batch_indices))
            self._reward_metrics["sampling/groups_dropped"] = float(batch.num_dropped_groups)
        rollouts = [batch.rollouts[row] for row in batch.chosen]
        record = flatten_rollouts(rollouts, step=step)
        if self.doctor.is_probe_due(step):
            round_trips = probes.check_round_trips(self.parts.policy.tokenizer, rollouts)
            record = replace(record, round_trip=round_trips)
        record = replace(record, facts={**record.facts, **self._count_answers(batch, record)})
        scores = remove_rewards(batch.chosen_scores, batch.kl_only)
        return with_rewards(record, scores, advantage=self.recipe.learner.advantage)

    def _count_answers(self, batch: RolloutBatch, record: StepRecord) -> dict[str, int]:
        """Return the counts of completions that state the dataset's answer, by their pay."""
        rollouts = [batch.rollouts[row] for row in batch.chosen]
        return count_paid_answers(
            [probes.dataset_row(rollout) for rollout in rollouts],
            [rollout.text for rollout in rollouts],
            np.stack(list(batch.chosen_scores.parts.values()), axis=1),
            [reward.function for reward in self.parts.task_data.rewards],
            record.group,
        )

    def record_sync(self, loaded: LoadResult, step: int) -> None:
        """Record the sync probe, and report a faulty sync before sampling or training on it."""
        self._sync_probe = loaded.probe_result
        if not self._sync_probe:
            return
        self.log.log_probe(step, "sampler_sync", self._sync_probe)
        self.doctor.report_sync(self._sync_probe, step, self.recipe.model.dtype)

    def run_probes(self, batch: RolloutBatch, record: StepRecord, kl_coef: float) -> None:
        """Run the active probes if they are due, and write their results to probes.jsonl."""
        self.probe_results = {"sampler_sync": {**self._sync_probe}} if self._sync_probe else {}
        if not self.doctor.is_probe_due(record.step):
            return
        task = self.parts.task_data.task
        try:
            results = self.learner.probe(record, kl_coef=kl_coef)
            if task is not None:
                rollouts = [batch.rollouts[row] for row in batch.chosen]
                results["regrade"] = probes.regrade_completions(
                    task, rollouts, batch.chosen_scores.total, self.score_rollouts
                )
        except LostError:
            raise
        except Exception as error:  # a failing probe must never end a run
            reason = f"{type(error).__name__}: {error_text(error)}"
            self.record_event(record.step, "probe failed", f"A probe failed: {reason}")
            return
        self.probe_results |= results
        for name, result in results.items():
            self.log.log_probe(record.step, name, result)

    def _parse_rate(self, rollouts: list[Rollout]) -> dict[str, float]:
        task = self.parts.task_data.task
        if task is None:
            return {}
        parsed = [task.parse(probes.dataset_row(r), r.text) is not None for r in rollouts]
        return {"completions/parse_rate": sum(parsed) / len(parsed)}

    def record_step(self, completed: CompletedStep, state: LoopState) -> bool:
        """Record a step; return whether to continue."""
        refuse_moved(self.parts.folder, self._folder_identity)
        # read once: a later signal stops after the next step
        stop_requested = self.stop_signal.is_requested
        metrics = self.collect_metrics(completed)
        self.log.log_metrics(completed.step, metrics)
        self._last_step, self._latest_metrics = completed.step, (completed.step, metrics)
        wishes = self._end_step(completed.step, metrics)
        stop_requested = stop_requested or wishes.stop
        if _is_due(self.recipe.loop.show_completions_every, completed.step):
            self.log.log_completions(completed)
        self._record_cluster_messages(completed.step)
        every = self.recipe.output.records_every
        if self._record_writer is not None and (completed.step - 1) % every == 0:
            self._record_writer.put(add_update_facts(completed, metrics))
        if completed.num_discarded:
            self.log.events.append(
                {"step": completed.step, "event": "discarded", "num": completed.num_discarded}
            )
        if self.recovery.confirm_transient(completed.step, completed.batch_indices):
            self.record_event(completed.step, TRANSIENT_EVENT, TRANSIENT_MESSAGE)
        self._record_warning_signs(
            completed.step, watch_step(self.signs, metrics, kl_limits(self.recipe.kl))
        )
        last = completed.step == self.recipe.loop.max_steps
        self.doctor.submit_step(doctor_record(completed, metrics), metrics, self.probe_results)
        if _is_due(self.recipe.loop.eval_every, completed.step) or last or wishes.evaluate:
            self.evaluate(completed.step)
        stop_requested = stop_requested or self._stop_wished
        due = _is_due(self.recipe.loop.checkpoint_every, completed.step)
        if due or last or stop_requested or wishes.save:
            self._refuse_non_finite(completed, metrics)
            self.save(state)
        self._finish_step(completed.step, is_end=last or stop_requested)
        return not stop_requested

    def _finish_step(self, step: int, *, is_end: bool) -> None:
        """Report the diagnosis at the end; drop old records; publish the state if that is due."""
        if is_end:
            self.doctor.report_diagnosis(step)
        if self.record_keeper.has_budget:
            named = [named_in for named_in, _ in self.log.named_causes()]
            self.record_keeper.drop_old(step, [*self.doctor.first_failures(), *named])
        self.publishing.publish(step)

    def collect_metrics(self, completed: CompletedStep) -> dict[str, float]:
        """Return every metric of a step by name."""
        sync_gaps = {
            f"sampling/sync_gap_{key}": float(gap)
            for key in SYNC_GAP_KEYS
            if (gap := self._sync_probe.get(key)) is not None
        }
        return all_step_metrics(completed, self._reward_metrics) | sync_gaps

    def _refuse_non_finite(self, completed: CompletedStep, metrics: Mapping[str, float]) -> None:
        """Refuse to checkpoint non-finite weights or optimizer moments."""
        anomaly = non_finite(self.learner.all_finite(), damaged=True)
        if anomaly is None:
            return
        if self.recovery.limits is None:
            raise RunStoppedError(
                f"{self.parts.display_folder}: {anomaly} at step "
                f"{completed.step}, and recovery is null. The "
                "step was not saved: continue from the newest checkpoint with --resume recovery={}."
            )
        raise StepAnomalyError(anomaly, completed.batch_indices, dict(metrics))

    def begin_callbacks(self, step: int) -> None:
        """Call the callbacks before the first step."""
        if self._callbacks is not None:
            self._callbacks.begin(
                self.recipe,
                step=step,
                num_rows=len(self.parts.task_data.rows),
                model=self.parts.policy.lm,
                tokenizer=self.parts.policy.tokenizer,
            )

    def _end_step(self, step: int, metrics: Mapping[str, float]) -> CallbackWishes:
        if self._callbacks is None:
            return CallbackWishes()
        return self._callbacks.end_step(step, metrics)

    def end_callbacks(self, step: int) -> None:
        """Call the callbacks after the last step."""
        if self._callbacks is not None:
            self._callbacks.end(step)

    def _record_cluster_messages(self, step: int) -> None:
        cluster = self.parts.cluster
        while cluster is not None and cluster.messages:
            self.record_event(step, "cluster", cluster.messages.popleft())

    def record_event(
        self, step: int, name: str, message: str, facts: EventFacts | None = None
    ) -> None:
        """Record an event, and send its message to all trackers."""
        self.log.record_event(step, name, message, facts)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy on held-out rows, and log the metrics."""
        if not self.parts.task_data.has_held_out_rows:
            return {}
        with self.sampler_lock:  # after the batch that a thread is sampling
            metrics = self._evaluate_with_retry(step)
        if metrics:
            self.log.log_metrics(step, metrics)
            if self._callbacks is not None:
                self._stop_wished |= self._callbacks.end_evaluation(step, metrics)
            self._latest_metrics = (step, {**self._metrics_at(step), **metrics})
            self.doctor.add_metrics(step, metrics)
            before = self.initial_eval or {}
            self._record_warning_signs(
                step, watch_retention(self.signs, metrics, before, self._retention_setup())
            )
        return metrics

    def _evaluate_with_retry(self, step: int) -> dict[str, float]:
        """Evaluate, with one retry; the next step's guard handles a non-finite policy."""
        for _ in range(2):
            try:
                return self._evaluate_by_sampler(step)
            except LogitsError:
                self.record_event(step, "evaluation failed", "Non-finite logits in an evaluation.")
        return {}

    def _evaluate_by_sampler(self, step: int) -> dict[str, float]:
        """Evaluate the sampler's most likely completions with the current weights."""
        policy = self.parts.policy
        loaded = self.sampler.load(self.learner.publish())
        self.doctor.report_sync(loaded.probe_result, step, self.recipe.model.dtype)
        encoder = PromptEncoder(policy.tokenizer, policy.name)
        complete = partial(complete_rows, self.sampler.greedy(), encoder)
        try:
            return self.parts.task_data.evaluate(complete, self.recipe, self.initial_eval)
        finally:
            release_sampler_memory(self.sampler)

    def _retention_setup(self) -> EvalSetup:
        task_data, num = self.parts.task_data, self.recipe.loop.eval_prompts
        retention_set = task_data.retention_set
        return EvalSetup(
            num=num if retention_set is None else min(num, len(retention_set.rows)),
            trained=task_data.skill,
        )

    def _record_warning_signs(self, step: int, watched: WarningUpdate) -> None:
        self.signs = watched.signs
        for sign in watched.new:
            self.record_event(step, sign.name, sign.sentence, sign.facts)

    def save(self, state: LoopState) -> Path:
        """Write a checkpoint of the learner, the loop state and the doctor."""
        if self._record_writer is not None:
            self._record_writer.flush()  # a resumed run does not write earlier records again
        run_state = RunState(state=state, initial_eval=self.initial_eval, signs=self.signs)
        self.publishing.wait(state.step)  # old checkpoints are removed
        folder = self.checkpoints.save(run_state, self._metrics_at(state.step))
        if self._callbacks is not None and state.step:  # not for the target of a first roll-back
            self._callbacks.end_save(state.step)
        self.publishing.publish(state.step, at_once=True)
        return folder

    def restore(self, saved: Checkpoint) -> LoopState:
        """Restore a checkpoint of this run."""
        return self._adopt_state(self.checkpoints.restore(saved))

    def _adopt_state(self, run_state: RunState) -> LoopState:
        self.initial_eval, self.signs = run_state.initial_eval, run_state.signs
        return run_state.state

    def _metrics_at(self, step: int) -> dict[str, float]:
        latest, metrics = self._latest_metrics
        return metrics if latest == step else {}


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
