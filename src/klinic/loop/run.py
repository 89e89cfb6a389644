"""A training run: implements the loop's protocol, and records, evaluates and saves every step."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klinic.doctor.retention import Exam, watch_retention
from klinic.doctor.trouble import not_a_number
from klinic.doctor.warning_signs import Signs, Watched, limits_of, watch_step
from klinic.errors import LogitsError, LostError, RunStoppedError, text_of
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout, flatten
from klinic.evidence.run_facts import EVENTS, METRICS, PROBES
from klinic.evidence.writing import write_durably
from klinic.learner.checkpoint import MODEL
from klinic.learner.protocol import Learner, Records
from klinic.loop import asking, checkpoint
from klinic.loop.consulting import DIAGNOSIS, Consulting
from klinic.loop.data import Prompts
from klinic.loop.folder import RESTARTED, as_named, identity_of, refuse_moved, step_of
from klinic.loop.gather import Gathered
from klinic.loop.live_doctor import SavedDoctor
from klinic.loop.recovering import DECISIONS, PASSED, TRANSIENT, Recovering, trouble_event
from klinic.loop.saving import Identity, Saved
from klinic.loop.source import Source
from klinic.loop.state import LoopState, StepDone
from klinic.loop.step_metrics import metrics_of, with_facts
from klinic.loop.stopping import Stopping
from klinic.loop.trackers.protocol import Tracker
from klinic.loop.watch import InTroubleError, Watch
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe
from klinic.report.model_card import CARD, Facts, model_card
from klinic.rewards.batch import with_rewards
from klinic.rewards.overlong import overlong, with_overlong
from klinic.rewards.runner import score
from klinic.rewards.scores import Scores, statistics, taken
from klinic.sampler.protocol import Sampler

if TYPE_CHECKING:
    from klinic.loop.clustered import Clustered

SYNCED = ("repeated", "fresh")
LASTING = DECISIONS | {RESTARTED}
"""Events that a rollback keeps, because they explain it."""


@dataclass(kw_only=True)
class Run:
    """The assembled run of a recipe."""

    recipe: Recipe
    folder: Path
    source: Source
    policy: Policy
    learner: Learner
    sampler: Sampler
    data: Prompts
    trackers: list[Tracker]
    reference: dict[str, Any]
    """Kind, source and digest of the reference at the start; the learner has its current state."""
    base: str | None
    """Digest of the base weights under an adapter, which checkpoints do not contain."""
    cluster: "Clustered | None" = None
    """Worker processes, if there are any."""
    stopping: Stopping = field(default_factory=Stopping)
    evaluated: dict[str, float] | None = None
    """Held-out metrics before the first step."""
    signs: Signs = field(default_factory=Signs)
    """State of the warning signs."""
    _rewards: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folder_identity = identity_of(self.folder)
        self._shown_folder = as_named(self.folder, self.recipe)
        self.max_steps = self.recipe.loop.max_steps
        self.updates_per_batch = self.recipe.learner.updates_per_batch
        self.reward_warmup_steps = self.recipe.learner.reward_warmup_steps
        self.extra_rounds = self.recipe.loop.extra_rounds
        self.recovering = Recovering(self.folder, self.recipe.recovery)
        limits = self.recovering.limits
        self.update_kl_limit = None if limits is None else limits.update_kl
        self.reference_rule = self.recipe.reference
        self.doctor = Consulting(
            self.folder, self.recipe.output.doctor, self.event, shown=self._shown_folder
        )
        self.journal = Journal(self.folder / METRICS)
        self.events = Journal(self.folder / EVENTS)
        self.answers = Journal(self.folder / PROBES)
        self._open = ExitStack()
        self._writer: Records | None = None
        self._sync: dict[str, Any] = {}
        self._rewarding = threading.Lock()
        self._last_step = 0
        self._latest: tuple[int, dict[str, float]] = (0, {})
        """A step and its metrics, for the model card of a checkpoint."""
        self._saved_doctor: SavedDoctor | None = None
        """The doctor's part of the checkpoint that was restored last."""
        self.asked: dict[str, dict[str, Any]] = {}
        """Probe results of this step, by probe."""

    def __enter__(self) -> "Run":
        self._open.enter_context(self.stopping)
        if self.cluster is not None:
            self._open.callback(self.cluster.close)
        self._open.callback(self.learner.close)
        self._open.callback(self.sampler.close)
        if self.recipe.output.records_every:
            self._writer = self._open.enter_context(self.learner.records(self.folder))
        for tracker in self.trackers:
            self._open.callback(tracker.close)
        for reward in self.source.every_reward:
            self._open.callback(reward.close)
        return self

    def __exit__(self, *error: Any) -> None:
        self._tell_of_cluster(self._last_step)  # a lost worker may be the reason for the exit
        self._open.__exit__(*error)

    def watch(self, state: LoopState) -> Watch:
        """Return the guard of the next step."""
        return Watch(
            self.recovering.limits,
            state.history,
            known=self.recovering.plan.known,
            place=self.next_place(state.position),
        )

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        return self.recovering.plan.lr_factor(step)

    def next_place(self, position: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""
        return self.recovering.plan.next_place(position)

    def recover(self, found: InTroubleError, state: LoopState) -> LoopState:
        """Handle an anomaly; return the state to continue from, or raise to stop."""
        step, trouble = state.step + 1, found.trouble
        decision = self.recovering.decide(found, state.history, step=step)
        self.events.append(trouble_event(step, decision, found))
        back_to = decision.plan.back_to
        if back_to is not None:
            state = self.go_back(back_to)
        else:
            self._forget_try(state.step)
        self._tell_event(step, decision.says)  # after trackers are rewound
        if decision.act == "stop":
            if not trouble.damaged:
                self.save(state)
            raise RunStoppedError(f"{self._shown_folder}: {decision.says}")
        return state

    def write_lost_decision(self) -> None:
        """Copy the last recovery decision to the events if a kill prevented that."""
        decided = self.recovering.event
        made = [entry for entry in self.events.entries() if entry["event"] in DECISIONS]
        if decided is not None and made[-1:] != [decided]:
            self.events.append(decided)

    def _forget_try(self, step: int) -> None:
        """Discard probes and events of a failed attempt, as a resumed run would."""
        self.answers.rewind(lambda entry: entry.get("step", 0) <= step)
        kept = LASTING | {DIAGNOSIS}
        self.events.rewind(lambda entry: entry.get("step", 0) <= step or entry["event"] in kept)

    def go_back(self, step: int) -> LoopState:
        """Roll back to a checkpoint, or the one before if it is broken, and discard later data."""
        if self._writer is not None:
            self._writer.flush()
        state, problems = self._restore_sound(step)
        checkpoint.set_aside_damaged(self.folder, after=state.step, at_most=step)
        self.forget_after(state.step)
        for problem in problems:
            self.event(state.step, "broken checkpoint", f"{problem} Using the one before.")
        for tracker in self.trackers:
            tracker.rewind(state.step)
        self.recovering.arrived()
        self.doctor.begin_again(state.step, self._saved_doctor)
        return state

    def open_doctor(self, *, after: int) -> None:
        """Start checking the steps after `after`; requires run.json."""
        self.doctor.open(after=after, saved=self._saved_doctor)
        self._open.callback(self.doctor.close)

    def _restore_sound(self, step: int) -> tuple[LoopState, list[str]]:
        """Restore the newest checkpoint, at most of `step`, that is valid and finite."""
        problems: list[str] = []
        while True:
            found = checkpoint.newest_good(self.folder, at_most=step)
            problems += found.broken
            if found.checkpoint is None:
                raise RunStoppedError(
                    f"{self._shown_folder}: no valid checkpoint is left to roll back to."
                )
            state = self.restore(found.checkpoint)
            if all(self.learner.sound().values()):
                return state, problems
            problems.append(f"{found.checkpoint.folder} holds non-finite values.")
            step = state.step - 1

    def forget_after(self, step: int) -> None:
        """Discard metrics, records and checkpoints of later steps; recovery decisions stay."""
        checkpoint.forget_after(self.folder, step)
        store.forget_after(self.folder, step)
        self.journal.rewind(lambda entry: step_of(entry, self.folder) <= step)
        self.answers.rewind(lambda entry: entry.get("step", 0) <= step)
        self.events.rewind(lambda entry: self._is_kept(entry, step))

    def _is_kept(self, entry: Mapping[str, Any], step: int) -> bool:
        """Whether an event survives a rollback to a step."""
        if entry["event"] in LASTING or entry.get("step", 0) < step:
            return True
        saved = self._saved_doctor
        if entry["event"] == DIAGNOSIS and saved is not None:
            # the diagnosis of the checkpoint's own step is reported after the save
            return entry.get("step", 0) == step and entry.get("cause") in saved.state["named"]
        return bool(entry.get("step", 0) <= step)

    def prompts(self, position: int) -> list[Prompt]:
        """Return a batch of prompts."""
        return self.data.at(position)

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return the rewards of completions, with the overlong penalty if it is enabled."""
        with self._rewarding:  # the prefetch thread computes rewards too
            scores = self._scores(rollouts)
        buffer = self.recipe.learner.overlong_buffer
        if not buffer:
            return scores
        lengths = np.array([rollout.num_policy_tokens for rollout in rollouts])
        limit = self.recipe.sampling.max_new_tokens
        return with_overlong(scores, overlong(lengths, limit=limit, buffer=buffer))

    def _scores(self, rollouts: list[Rollout]) -> Scores:
        if self.cluster is not None and self.cluster.section.reward_workers:
            return self.cluster.scores(rollouts)
        return score(rollouts, self.source.rewards)

    def judge(self, gathered: Gathered, step: int) -> StepRecord:
        """Return the chosen completions as a record with rewards and advantages."""
        self._rewards = statistics(gathered.scores) | self._parse_rate(gathered.rollouts)
        if self.extra_rounds:
            self._rewards["sampling/rounds"] = float(len(gathered.places))
            self._rewards["sampling/groups_dropped"] = float(gathered.num_dropped)
        rollouts = [gathered.rollouts[row] for row in gathered.chosen]
        record = flatten(rollouts, step=step)
        if self.doctor.asks(step):
            known = asking.round_trips(self.policy.tokenizer, rollouts)
            record = replace(record, round_trip=known)
        scores = taken(gathered.scores, gathered.chosen)
        return with_rewards(record, scores, advantage=self.recipe.learner.advantage)

    def synced(self, answer: Mapping[str, Any], step: int) -> None:
        """Record the sync probe, and report a faulty sync before sampling or training on it."""
        self._sync = dict(answer)
        if not answer:
            return
        self.answers.append({"step": step, "probe": "sampler_sync", **answer})
        self.doctor.hear_sync(answer, step, self.recipe.model.dtype)

    def ask(self, gathered: Gathered, record: StepRecord, kl_coef: float) -> None:
        """Run the active probes if they are due, and write their results to probes.jsonl."""
        self.asked = {"sampler_sync": self._sync} if self._sync else {}
        if not self.doctor.asks(record.step):
            return
        try:
            answers = self.learner.probe(record, kl_coef=kl_coef)
            if self.source.task is not None:
                rollouts = [gathered.rollouts[row] for row in gathered.chosen]
                answers["regrade"] = asking.regrade(self.source.task, rollouts, record, self.reward)
        except LostError:
            raise
        except Exception as error:  # a failing probe must never end a run
            what = f"{type(error).__name__}: {text_of(error)}"
            self.event(record.step, "probe failed", f"A probe failed: {what}")
            return
        self.asked |= answers
        for name, answer in answers.items():
            self.answers.append({"step": record.step, "probe": name, **answer})

    def _parse_rate(self, rollouts: list[Rollout]) -> dict[str, float]:
        task = self.source.task
        if task is None:
            return {}
        parsed = [task.parse(asking.row_of(r), r.text) is not None for r in rollouts]
        return {"completions/parse_rate": sum(parsed) / len(parsed)}

    def keep(self, done: StepDone, state: LoopState) -> bool:
        """Record a step; return whether to continue."""
        refuse_moved(self.folder, self._folder_identity)
        asked = self.stopping.asked  # read once: a later signal stops after the next step
        metrics = self.metrics(done)
        self.journal.append({"step": done.step, **metrics})
        self._last_step, self._latest = done.step, (done.step, metrics)
        self._tell(done, metrics)
        self._tell_of_cluster(done.step)
        every = self.recipe.output.records_every
        if self._writer is not None and (done.step - 1) % every == 0:
            self._writer.put(with_facts(done, metrics))
        if done.discarded:
            self.events.append({"step": done.step, "event": "discarded", "num": done.discarded})
        if self.recovering.has_passed(done.step, done.places):
            self.event(done.step, TRANSIENT, PASSED)
        self._watch(done.step, watch_step(self.signs, metrics, limits_of(self.recipe.kl)))
        last = done.step == self.max_steps
        self.doctor.see(with_facts(done, metrics), metrics, self.asked)
        if _due(self.recipe.loop.eval_every, done.step) or last:
            self.evaluate(done.step)
        if _due(self.recipe.loop.checkpoint_every, done.step) or last or asked:
            self._refuse_unsound(done, metrics)
            self.save(state)
        if last or asked:
            self.doctor.hear(done.step)
        return not asked

    def metrics(self, done: StepDone) -> dict[str, float]:
        """Return every metric of a step by name."""
        apart = {f"sampling/sync_gap_{key}": self._sync[key] for key in SYNCED if key in self._sync}
        return metrics_of(done, self._rewards, self.recipe.learner) | apart

    def _refuse_unsound(self, done: StepDone, metrics: Mapping[str, float]) -> None:
        """Refuse to checkpoint non-finite weights or optimizer moments."""
        trouble = not_a_number(self.learner.sound(), damaged=True)
        if trouble is None:
            return
        if self.recovering.limits is None:
            raise RunStoppedError(
                f"{self._shown_folder}: {trouble} at step {done.step}, and recovery is null. The "
                "step was not saved: continue from the newest checkpoint with --resume recovery={}."
            )
        raise InTroubleError(trouble, done.places, dict(metrics))

    def _tell_of_cluster(self, step: int) -> None:
        while self.cluster is not None and self.cluster.news:
            self.event(step, "cluster", self.cluster.news.popleft())

    def _tell(self, done: StepDone, metrics: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.metrics(done.step, metrics)
            if _due(self.recipe.loop.show_completions_every, done.step):
                tracker.completions(done.step, done.rollouts, done.record)

    def event(self, step: int, name: str, sentence: str, **facts: Any) -> None:
        """Record an event, and send its message to all trackers."""
        self.events.append({"step": step, "event": name, "says": sentence, **facts})
        self._tell_event(step, sentence)

    def _tell_event(self, step: int, sentence: str) -> None:
        for tracker in self.trackers:
            tracker.event(step, sentence)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy on held-out rows, and log the metrics."""
        self.learner.publish()  # with sharded weights, the policy here is a copy
        metrics = self._measured(step)
        if metrics:
            self.journal.append({"step": step, **metrics})
            self._latest = (step, {**self._metrics_at(step), **metrics})
            self.doctor.tell(step, metrics)
            for tracker in self.trackers:
                tracker.metrics(step, metrics)
            before = self.evaluated or {}
            self._watch(step, watch_retention(self.signs, metrics, before, self._exam()))
        return metrics

    def _measured(self, step: int) -> dict[str, float]:
        """Evaluate, with one retry; the next step's guard handles a non-finite policy."""
        for _ in range(2):
            try:
                return self.source.evaluate(self.policy, self.recipe, self.evaluated)
            except LogitsError:
                self.event(step, "evaluation failed", "Non-finite logits in an evaluation.")
        return {}

    def _exam(self) -> Exam:
        num, kept = self.recipe.loop.eval_prompts, self.source.kept
        return Exam(
            num=num if kept is None else min(num, len(kept.rows)), trained=self.source.skill
        )

    def _watch(self, step: int, watched: Watched) -> None:
        self.signs = watched.signs
        for sign in watched.new:
            self.event(step, sign.name, sign.sentence, **sign.facts)

    def save(self, state: LoopState) -> Path:
        """Write a checkpoint of the learner, the loop state and the doctor."""
        if self._writer is not None:
            self._writer.flush()  # a resumed run does not write earlier records again

        def fill(folder: Path) -> dict[str, Any]:
            learner = self.learner.save(folder)
            card = model_card(self._card(state, learner))
            write_durably(folder / MODEL / CARD, card.encode("utf-8", "backslashreplace"))
            doctor = self.doctor.save(folder)
            saved = Saved(state=state, evaluated=self.evaluated, signs=self.signs, doctor=doctor)
            return saved.to_json(self._identity, learner, self.recipe.seed)

        keep = self.recipe.loop.keep_checkpoints
        spare = self.recovering.spare(state.history)
        return checkpoint.write(self.folder, state.step, fill=fill, keep=keep, spare=spare)

    def _card(self, state: LoopState, learner: Mapping[str, Any]) -> Facts:
        named = [e for e in self.events.entries() if e["event"] == DIAGNOSIS]
        return Facts(
            recipe=self.recipe,
            step=state.step,
            kl_coef=None if state.kl is None else state.kl.coef,
            reference={**self.reference, **learner.get("reference", {})},
            metrics=self._metrics_at(state.step),
            causes=[(e["step"], e["cause"]) for e in named] if self.doctor.examined else None,
        )

    def _metrics_at(self, step: int) -> dict[str, float]:
        latest, metrics = self._latest
        return metrics if latest == step else {}

    def restore(self, saved: checkpoint.Checkpoint) -> LoopState:
        """Restore a checkpoint of this run."""
        self._identity.refuse_other(saved)
        self.learner.load(saved.folder, saved.state["learner"])
        known = Saved.from_checkpoint(saved)
        self.evaluated, self.signs = known.evaluated, known.signs
        doctor = known.doctor
        self._saved_doctor = (
            None if doctor is None else SavedDoctor(state=doctor, folder=saved.folder)
        )
        return known.state

    @property
    def _identity(self) -> Identity:
        return Identity(reference=self.reference, base=self.base, data=self.data.digest)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
