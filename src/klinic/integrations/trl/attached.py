"""The session of `klinic.attach`: follows each step of an unmodified TRL GRPOTrainer.

`hooks.py` lists the wrapped methods; `updates.py` decides whether an update is skipped.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import TrainerCallback

from klinic.errors import RunStoppedError, text_of
from klinic.evidence.record import Fact, StepRecord
from klinic.integrations.trl import describe, questions
from klinic.integrations.trl.hooks import Hooks
from klinic.integrations.trl.keeping import Keeper
from klinic.integrations.trl.kl_term import KLTerm, TRLTerm
from klinic.integrations.trl.records import ROW, Trained, num_empty, to_record
from klinic.integrations.trl.reference import Reference, distance_at_start, identity, reference_of
from klinic.integrations.trl.scoring import some_rows, trained_on, unseen
from klinic.integrations.trl.step_metrics import SHOWN, metrics_of, parse_rate
from klinic.integrations.trl.updates import Updates
from klinic.loop.asking import comes_back, is_time
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe.kl import KLSection
from klinic.recipe.recovery import RecoverySection

MARK = "_klinic"  # the trainer attribute that holds the attached session


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options of `klinic.attach` beyond the records."""

    monitor_kl_every: int = 0
    parse: Callable[[str], Any] | None = None
    accuracy: str | None = None
    kl: KLSection | None = None
    recovery: RecoverySection | None = None


class Attached:
    """Records, probes and diagnoses the steps of a trainer, until `detach`."""

    def __init__(self, trainer: Any, keeper: Keeper, wanted: Wanted) -> None:
        self.trainer = trainer
        self.folder = keeper.folder
        self._keeper = keeper
        self._wanted = wanted
        self._facts: dict[str, Fact] = {}
        self._answers: dict[str, Any] = {}
        self._kl = None if wanted.kl is None else KLTerm(trainer, wanted.kl)
        self._term = self._kl or TRLTerm(trainer)
        self._updates = Updates(trainer, wanted.recovery)
        every = wanted.monitor_kl_every if self._kl is None else 1
        with unseen(trainer):
            self.reference: Reference | None = reference_of(trainer, monitored=every > 0)
        self._hooks = Hooks(trainer, self.reference, self._kl, watch_every=every)
        self._hooks.wrap(self._begin_step)
        self._callback = _Steps(self)
        trainer.add_callback(self._callback)
        setattr(trainer, MARK, self)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore every wrapped method and close the run log."""
        self._hooks.undo()
        self.trainer.remove_callback(self._callback)
        vars(self.trainer).pop(MARK, None)
        self._keeper.close()

    @property
    def _step(self) -> int:
        return self._hooks.step

    def begin(self) -> None:
        """Write run.json, recipe.yaml and the token texts before the first step."""
        trainer = self.trainer
        self._keeper.say(f"Run: {self.folder}")
        if self._kl is not None:
            name = self._kl.section.estimator
            self._keeper.say(f"KL estimator {name} replaces TRL's: {ESTIMATORS[name].sentence}")
        self._keeper.begin(
            describe.run_facts(trainer, self.reference, self._term.name),
            describe.recipe_values(trainer, str(self.folder)),
            _texts(trainer),
        )

    def _begin_step(self, model: Any, inputs: Any) -> None:
        """Collect the facts that hold before the update, and run the probes when due."""
        reference, drawn = self.reference, self._hooks.drawn
        # an update on completions of an earlier generation publishes no weights
        fresh = drawn is not None and drawn.version == self._step - 1
        self._facts = {
            "kl_coef": self._term.coef,
            "entropy_coef": float(getattr(self.trainer, "entropy_coef", None) or 0.0),
            "learner_version": self._step - 1,
            "weights_published": drawn.fingerprint if drawn is not None and fresh else None,
            "micro_batch_size": len(inputs["completion_ids"]),
            "scoring_batch_size": self.trainer.args.per_device_train_batch_size,
            "reference_digest": None if reference is None else reference.digest,
            "reference_fingerprint": None if reference is None else reference.fingerprint(),
        }
        self._answers = {}
        if not self._keeper.examined or not (is_time(self._step) or self._keeper.curious):
            return
        try:
            self._ask(model, inputs)
        except Exception as error:  # a failed probe must not end the run
            what = f"{type(error).__name__}: {text_of(error)}"
            said = f"A probe failed: {what}"
            self._keeper.event(self._step, "probe failed", said)

    def _ask(self, model: Any, inputs: Any) -> None:
        hooks, batch = self._hooks, some_rows(inputs, questions.asked_rows(inputs))
        if self._step == 1 and self.reference is not None:
            self._verify_reference(self.reference, batch)
        said = None if hooks.drawn is None else hooks.drawn.logp_sampler
        numbers = batch[ROW].tolist()
        asked = questions.Asked(
            trainer=self.trainer,
            model=model,
            score=hooks.score,
            loss=hooks.full_loss,
            estimator=self._term.name if self._term.coef else None,
            hears_sampler=self._kl is not None,
            coefficient=self._term.held,
            batch=batch,
            logp_sampler=None if said is None else [said[number] for number in numbers],
        )
        self._answers = questions.ask(asked)

    def _verify_reference(self, reference: Reference, batch: Any) -> None:
        """Report whether policy and reference agree before the first update."""
        apart = distance_at_start(self.trainer, self._hooks.score, reference, batch)
        sentence = identity(reference, apart, int(trained_on(batch).sum()))
        self._keeper.event(0, "reference", sentence, apart=apart, digest=reference.digest)

    def before_update(self) -> None:
        """Record the learning rate; skip the update or cut its rate as recovery decides."""
        self._facts["learning_rate"] = self._updates.rate
        self._updates.look(self._step)
        if self._updates.judges:
            says = self._updates.judge(self._record(self._step, self._hooks.trained))
            if says:
                self._keeper.event(self._step, "trouble", says)
            self._facts["learning_rate"] = self._updates.rate

    def after_update(self) -> None:
        """Record the fraction of weights that the update left unchanged."""
        unchanged = self._updates.look_again()
        if unchanged is not None:
            self._facts["unchanged_share"] = unchanged

    def keep(self, step: int) -> None:
        """Write the record and the metrics of a finished step."""
        batches = self._hooks.take_batches()
        if not batches:
            return
        with self._hooks.timed("klinic"):
            record = self._record(step, batches)
            metrics = metrics_of(record, self.trainer.args, kl_coef=self._term.coef)
            metrics |= parse_rate(batches, self._wanted.parse)
        seconds = self._hooks.take_seconds()
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        self._show(metrics)
        if self._kl is not None:
            self._kl.adapt(record)
        verdict = self._updates.take_verdict()
        metrics["discarded"] = float(verdict.skip)
        self._keeper.keep(record, metrics, self._answers)
        if verdict.stop:
            raise RunStoppedError(f"{self.folder}: {verdict.says}")

    def _show(self, metrics: Mapping[str, float]) -> None:
        """Add the KL metrics to TRL's own log."""
        log = self.trainer._metrics["train"]
        for name in SHOWN:
            if name in metrics:
                log[f"klinic/{name}"].append(metrics[name])
        if self._kl is not None:
            log["kl"].append(metrics.get("kl", math.nan))
            log["kl_coef"].append(metrics["kl_coef"])

    def _record(self, step: int, batches: list[Trained]) -> StepRecord:
        facts = {
            **self._facts,
            **({} if self._hooks.grad_norm is None else {"grad_norm": self._hooks.grad_norm}),
            "loss": float(sum(batch.loss for batch in batches)),
            "num_micro_batches": len(batches),
            "num_empty_micro_batches": num_empty(batches),
        }
        tokenizer = self.trainer._tokenizer
        return to_record(
            step,
            batches,
            eos_ids=self.trainer.eos_token_ids,
            facts=facts,
            round_trip=partial(comes_back, tokenizer) if self._answers else None,
        )

    def shown(self, num: int) -> Iterator[tuple[str, str, float]]:
        """Yield prompt, text and reward of the first completions of the last generation."""
        drawn, rewarded = self._hooks.drawn, self._hooks.rewarded
        if drawn is None or rewarded is None:
            return
        rows = zip(rewarded.prompts, drawn.texts, rewarded.total, strict=True)
        for prompt, text, reward in list(rows)[:num]:
            yield prompt, text, float(reward)

    def hear_log(self, logs: Mapping[str, Any]) -> None:
        """Record the accuracy of an evaluation log, if it has the accuracy reward."""
        measured = logs.get(f"eval_rewards/{self._wanted.accuracy}/mean")
        if measured is not None:
            step = int(self.trainer.state.global_step)
            self._keeper.tell(step, {"eval/accuracy": float(measured)})

    def end(self) -> None:
        """Report the final diagnosis and close the run log."""
        self._keeper.end(int(self.trainer.state.global_step))


def _texts(trainer: Any) -> dict[int, str]:
    tokenizer = trainer._tokenizer
    return {number: tokenizer.decode([number]) for number in range(len(tokenizer))}


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Forwards TRL's callbacks around each update to the session."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._attached.begin()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._attached.before_update()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._attached.after_update()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self._attached.keep(int(state.global_step))

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        self._attached.hear_log(logs or {})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._attached.end()
