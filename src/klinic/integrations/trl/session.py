"""The session of `klinic.attach`: follows each step of an unmodified TRL GRPOTrainer.

In a run of several processes each has a session, and all make the same calls: rank 0 joins the rows
of a step, writes, diagnoses and decides.

`hooks.py` lists the wrapped methods; `updates.py` decides whether an update is skipped.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from klinic.doctor.live import is_probe_due
from klinic.errors import RunStoppedError, error_text
from klinic.evidence.processes import all_gather_json, broadcast_json
from klinic.evidence.record import Fact, StepRecord
from klinic.integrations.trl import probes, run_facts
from klinic.integrations.trl.hooks import TrainerHooks
from klinic.integrations.trl.kl_checkpoint import STATE_FILE
from klinic.integrations.trl.kl_term import KlinicKLTerm, TRLKLTerm
from klinic.integrations.trl.records import (
    LOGGED_KL_METRICS,
    build_record,
    compute_step_metrics,
    generation_rows,
    num_empty_batches,
    parse_counts,
)
from klinic.integrations.trl.recovery import UpdateDecision
from klinic.integrations.trl.reference import (
    TRLReference,
    describe_reference,
    distance_at_start,
    find_reference,
)
from klinic.integrations.trl.run_log import TRLRunLog
from klinic.integrations.trl.scoring import select_rows, trained_mask, without_side_effects
from klinic.integrations.trl.sharding import NO_GRADIENTS, has_gradients, without_wrapper
from klinic.integrations.trl.step_join import JoinedStep, join_step
from klinic.integrations.trl.trained_rows import MicroBatch
from klinic.integrations.trl.updates import UpdateGuard
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe.sections import KLSection, RecoverySection
from klinic.training.probes import ids_round_trip

SESSION_ATTRIBUTE = "_klinic"  # the trainer attribute that holds the attached session
UNSEEN_STEP = (
    "This step was trained without {missing}{where}, so klinic has no record of it and cannot "
    "examine it: the trainer's class or a patch replaces that part of TRL. Call TRL's method "
    "there, or record the loop with klinic.Recorder."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Options of `klinic.attach` beyond the records."""

    monitor_kl_every: int = 0
    parse: Callable[[str], Any] | None = None
    accuracy: str | None = None
    kl: KLSection | None = None
    recovery: RecoverySection | None = None


class TRLSession:
    """Records, probes and diagnoses the steps of a trainer, until `detach`."""

    def __init__(self, trainer: Any, run_log: TRLRunLog, options: AttachOptions) -> None:
        self.trainer = trainer
        self.folder = run_log.folder
        self._run_log = run_log
        self._processes = run_log.processes
        self._options = options
        self._facts: dict[str, Fact] = {}
        self._probe_results: dict[str, Any] = {}
        self._kl_term = None if options.kl is None else KlinicKLTerm(trainer, options.kl)
        self._active_term = self._kl_term or TRLKLTerm(trainer)
        self._update_guard = UpdateGuard(trainer, options.recovery)
        monitor_every = options.monitor_kl_every if self._kl_term is None else 1
        with without_side_effects(trainer):
            self.reference: TRLReference | None = find_reference(
                trainer, monitored=monitor_every > 0
            )
        self._hooks = TrainerHooks(
            trainer,
            self.reference,
            self._kl_term,
            monitor_every=monitor_every,
            processes=self._processes,
        )
        self._hooks.wrap_methods(self._begin_step, self._train)
        self._num_unseen_steps = 0
        self._callback = _StepCallback(self)
        trainer.add_callback(self._callback)
        setattr(trainer, SESSION_ATTRIBUTE, self)

    def __enter__(self) -> "TRLSession":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end_run(error)
        self.detach()

    def detach(self) -> None:
        """Restore every wrapped method and end the run log."""
        self._hooks.restore_methods()
        self.trainer.remove_callback(self._callback)
        vars(self.trainer).pop(SESSION_ATTRIBUTE, None)
        self.end_run()

    def _train(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, and write the end of a training that raises: TRL calls no callback then."""
        try:
            return real(*args, **kwargs)
        except BaseException as error:
            self.end_run(error)
            raise

    @property
    def _current_step(self) -> int:
        return self._hooks.current_step

    def begin_run(self) -> None:
        """Write run.json, recipe.yaml and the token texts before the first step."""
        trainer = self.trainer
        self._run_log.print_line(f"Run: {self.folder}")
        if self._kl_term is not None:
            name = self._kl_term.section.estimator
            self._run_log.print_line(
                f"KL estimator {name} replaces TRL's: {ESTIMATORS[name].sentence}"
            )
        self._run_log.begin_trl_run(
            run_facts.run_facts(trainer, self.reference, self._active_term.name),
            run_facts.recipe_values(trainer, str(self.folder)),
            _token_texts(trainer),
        )
        if not has_gradients(trainer) and self._run_log.has_doctor:
            self._run_log.record_event(0, "not measured", NO_GRADIENTS)
        self._continue_controller(int(trainer.state.global_step))

    def _continue_controller(self, step: int) -> None:
        """Report a resumed run whose checkpoint has no controller state."""
        if self._kl_term is None or step == 0 or self._kl_term.continue_from(step):
            return
        message = (
            f"The checkpoint of step {step} has no {STATE_FILE}: it was saved without klinic's KL "
            f"term. The KL coefficient starts at {self._kl_term.section.coef:g}."
        )
        self._run_log.record_event(step, "kl controller not restored", message)

    def save_controller(self, checkpoint: Path) -> None:
        """Save the KL controller in a checkpoint of TRL."""
        if self._kl_term is not None and self._run_log.is_writer and checkpoint.is_dir():
            self._kl_term.save_state(checkpoint)

    def _begin_step(self, model: Any, inputs: Any) -> None:
        """Collect the facts that hold before the update, and run the probes when due."""
        reference, generation = self.reference, self._hooks.generation
        # an update on completions of an earlier generation publishes no weights
        is_fresh = generation is not None and generation.version == self._current_step - 1
        self._facts = {
            "kl_coef": self._active_term.coef,
            "entropy_coef": float(getattr(self.trainer, "entropy_coef", None) or 0.0),
            "learner_version": self._current_step - 1,
            "weights_published": generation.fingerprint
            if generation is not None and is_fresh
            else None,
            "weights_loaded": generation.loaded_fingerprint
            if generation is not None and is_fresh
            else None,
            "micro_batch_size": len(inputs["completion_ids"]),
            "scoring_batch_size": self.trainer.args.per_device_train_batch_size,
            "reference_digest": None if reference is None else reference.digest,
            "reference_fingerprint": None if reference is None else reference.fingerprint(),
            **self._hooks.take_answer_counts(),
        }
        self._probe_results = {}
        # not before the update: DeepSpeed makes it within the backward pass
        self._update_guard.snapshot_weights(self._current_step)
        if not self._run_log.has_doctor or not (
            is_probe_due(self._current_step) or self._run_log.is_probe_due
        ):
            return
        try:
            self._run_probes(model, inputs)
        except Exception as error:  # a failed probe must not end the run
            description = f"{type(error).__name__}: {error_text(error)}"
            message = f"A probe failed: {description}"
            self._run_log.record_event(self._current_step, "probe failed", message)

    def _run_probes(self, model: Any, inputs: Any) -> None:
        hooks, batch = self._hooks, select_rows(inputs, probes.probe_rows(inputs))
        model = without_wrapper(model)
        if self._current_step == 1 and self.reference is not None:
            self._verify_reference(self.reference, batch)
        generation = hooks.generation
        sampler_rows = None if generation is None else generation.logp_sampler
        target = probes.TRLProbeTarget(
            trainer=self.trainer,
            model=model,
            score=hooks.score,
            loss=hooks.full_loss,
            estimator=self._active_term.name if self._active_term.coef else None,
            uses_sampler_logp=self._kl_term is not None,
            override_coef=self._active_term.override_coef,
            processes=self._processes,
            batch=batch,
            logp_sampler=None
            if sampler_rows is None or generation is None
            else [sampler_rows[row] for row in generation_rows(batch, generation)],
        )
        self._probe_results = probes.run_probes(target)

    def _verify_reference(self, reference: TRLReference, batch: Any) -> None:
        """Report whether policy and reference agree before the first update."""
        own = distance_at_start(self.trainer, self._hooks.score, reference, batch)
        measured = [own, int(trained_mask(batch).sum())]
        differences, nums = zip(*all_gather_json(self._processes, measured), strict=True)
        difference = max(differences)
        sentence = describe_reference(reference, difference, sum(nums))
        self._run_log.record_event(
            0, "reference", sentence, {"apart": difference, "digest": reference.digest}
        )

    def before_update(self) -> None:
        """Record the learning rate; skip the update or cut its rate as recovery decides."""
        self._facts["learning_rate"] = self._update_guard.learning_rate
        num_batches = len(self._hooks.micro_batches)
        if self._update_guard.can_skip and all(all_gather_json(self._processes, num_batches)):
            decision = self._decide_update()
            self._update_guard.apply_decision(decision)
            if decision.message:
                self._run_log.record_event(self._current_step, "trouble", decision.message)
            self._facts["learning_rate"] = self._update_guard.learning_rate

    def _decide_update(self) -> UpdateDecision:
        """Return the decision of rank 0 about the pending update, on every process."""
        own = self._build_record(self._current_step, self._hooks.micro_batches)
        finite = self._update_guard.weights_finite()
        step = join_step(self._processes, own, weights_finite=finite)
        values = None
        if step is not None:
            values = asdict(
                self._update_guard.judge_update(step.record, weights_finite=step.weights_finite)
            )
        return UpdateDecision(**broadcast_json(self._processes, values))

    def after_update(self) -> None:
        """Record the fraction of weights that the update left unchanged."""
        unchanged = self._update_guard.unchanged_fraction()
        if unchanged is not None:
            self._facts["unchanged_share"] = unchanged

    def record_step(self, step: int) -> None:
        """Write the record and the metrics of a finished step."""
        batches = self._hooks.take_batches()
        if not self._has_batches(step, batches):
            return
        with self._hooks.add_seconds("klinic"):
            joined = join_step(
                self._processes,
                self._build_record(step, batches),
                probe_results=self._probe_results,
                parsed=parse_counts(batches, self._options.parse),
            )
            metrics = {} if joined is None else self._step_metrics(joined)
        seconds = self._hooks.take_seconds()
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        decision = self._update_guard.take_decision()
        metrics["discarded"] = float(decision.skip)
        self._share_step(joined, metrics)
        if decision.stop:
            raise RunStoppedError(f"{self.folder}: {decision.message}")

    def _has_batches(self, step: int, batches: list[MicroBatch]) -> bool:
        """Whether every process has batches of the step; report it if one has none."""
        counts = all_gather_json(self._processes, len(batches))
        if all(counts):
            return True
        self._num_unseen_steps += 1
        if self._num_unseen_steps == 1:
            ranks = [str(rank) for rank, num in enumerate(counts) if not num]
            where = "" if len(counts) == 1 else f" in process {', '.join(ranks)}"
            sentence = UNSEEN_STEP.format(missing=self._hooks.first_unseen_method(), where=where)
            self._run_log.record_event(step, "step not recorded", sentence)
        return False

    def _step_metrics(self, step: JoinedStep) -> dict[str, float]:
        metrics = compute_step_metrics(
            step.record, self.trainer.args, kl_coef=self._active_term.coef
        )
        if step.num_to_parse:
            metrics["completions/parse_rate"] = step.num_parsed / step.num_to_parse
        return metrics

    def _share_step(self, step: JoinedStep | None, metrics: Mapping[str, float]) -> None:
        """Write the step on rank 0; take over its KL controller on the other processes."""
        term, decisions = self._kl_term, {}
        if step is not None:
            self._log_kl_metrics(metrics)
            if term is not None:
                term.update_coef(step.record)
                decisions = {"kl_controller": term.state()}
        shared = self._run_log.record_step(
            None if step is None else step.record,
            metrics,
            {} if step is None else step.probe_results,
            decisions,
        )
        if step is None and term is not None:
            term.adopt_state(shared["kl_controller"])

    def _log_kl_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add the KL metrics to TRL's own log."""
        log = self.trainer._metrics["train"]
        for name in LOGGED_KL_METRICS:
            if name in metrics:
                log[f"klinic/{name}"].append(metrics[name])
        if self._kl_term is not None:
            log["kl"].append(metrics.get("kl", math.nan))
            log["kl_coef"].append(metrics["kl_coef"])

    def _build_record(self, step: int, batches: list[MicroBatch]) -> StepRecord:
        facts = {
            **self._facts,
            **({} if self._hooks.grad_norm is None else {"grad_norm": self._hooks.grad_norm}),
            "loss": float(sum(batch.loss for batch in batches)),
            "num_micro_batches": len(batches),
            "num_empty_micro_batches": num_empty_batches(batches),
        }
        tokenizer = self.trainer._tokenizer
        return build_record(
            step,
            batches,
            eos_ids=self.trainer.eos_token_ids,
            facts=facts,
            round_trip=partial(ids_round_trip, tokenizer) if self._probe_results else None,
        )

    def first_completions(self, num: int) -> Iterator[tuple[str, str, float]]:
        """Yield prompt, text and reward of the first completions of the last generation."""
        generation, rewards = self._hooks.generation, self._hooks.rewards
        if generation is None or rewards is None:
            return
        rows = zip(rewards.prompts, generation.texts, rewards.total, strict=True)
        for prompt, text, reward in list(rows)[:num]:
            yield prompt, text, float(reward)

    def record_evaluation(self, logs: Mapping[str, Any]) -> None:
        """Record the accuracy of an evaluation log, if it has the accuracy reward."""
        accuracy = logs.get(f"eval_rewards/{self._options.accuracy}/mean")
        if accuracy is not None:
            step = int(self.trainer.state.global_step)
            self._run_log.record_metrics(step, {"eval/accuracy": float(accuracy)})

    def end_run(self, error: BaseException | None = None) -> None:
        """Report the final diagnosis and close the run log; `error` ended the training."""
        if self._num_unseen_steps:
            self._run_log.print_line(
                f"{self._num_unseen_steps} steps were not recorded: nothing is known about them.",
                style="yellow",
            )
            self._num_unseen_steps = 0
        self._run_log.end_run(int(self.trainer.state.global_step), error)


def _token_texts(trainer: Any) -> dict[int, str]:
    tokenizer = trainer._tokenizer
    return {number: tokenizer.decode([number]) for number in range(len(tokenizer))}


class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Forwards TRL's callbacks around each update to the session."""

    def __init__(self, session: TRLSession) -> None:
        self._session = session

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._session.begin_run()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._session.before_update()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._session.after_update()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self._session.record_step(int(state.global_step))

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._session.save_controller(Path(args.output_dir) / name)

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        self._session.record_evaluation(logs or {})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._session.end_run()
