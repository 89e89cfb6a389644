"""klinic beside an unmodified TRL GRPOTrainer: the methods that are wrapped, and what is taken.

    wrapped method                        what is taken from it
    _generate                             token ids, who emitted them, the sampler's log-probs
    _calculate_rewards                    rewards by function, and which rows are compared
    _generate_and_score_completions       a column of row numbers is added; the KL that is watched
    _get_per_token_logps_and_entropies    log-probs and entropy of the forward that is trained on
    _compute_loss                         the batch and its loss; before it, questions are asked
    accelerator.clip_grad_norm_           the gradient's norm

Whatever is read is detached, whatever is computed beside leaves the random streams as they were,
and nothing is changed in place: training comes to the same bits as without.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from klinic.errors import RunStoppedError
from klinic.evidence.metrics import clip_metrics, step_metrics
from klinic.evidence.record import Fact, StepRecord
from klinic.integrations.trl import describe, questions
from klinic.integrations.trl.drawn import Drawn, Rewarded, drawn, rewarded
from klinic.integrations.trl.generation import Heard, listening
from klinic.integrations.trl.keeping import Keeper
from klinic.integrations.trl.kl_term import KLTerm
from klinic.integrations.trl.records import ROW, Trained, num_empty, to_record
from klinic.integrations.trl.recovering import Recovering, Verdict, drop_gradients
from klinic.integrations.trl.reference import (
    Reference,
    distance_at_start,
    identity,
    policy_of,
    reference_of,
)
from klinic.integrations.trl.scoring import LOGP_REF, some_rows, trained_on, unseen
from klinic.integrations.trl.wrapping import Wrapped
from klinic.learner.update import all_finite
from klinic.loop.asking import comes_back, is_time
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.adapters import is_adapted
from klinic.model.weights import fingerprint, sampled, trained
from klinic.recipe.kl import KLSection
from klinic.recipe.recovery import RecoverySection

MARK = "_klinic"  # the attribute of a trainer that says who is attached
FIGURES = ("mean", "max", "p99", "share_above")
SHOWN = tuple(f"kl_{name}/{figure}" for name in ("k1", "k3") for figure in FIGURES)
"""Metrics of the KL that TRL's own log shows as well, under `klinic/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for beyond records."""

    monitor_kl_every: int = 0
    parse: Callable[[str], Any] | None = None
    accuracy: str | None = None
    kl: KLSection | None = None
    recovery: RecoverySection | None = None


class Attached:
    """klinic beside a trainer, until `detach`."""

    def __init__(self, trainer: Any, keeper: Keeper, wanted: Wanted) -> None:
        self.trainer = trainer
        self.folder = keeper.folder
        self._keeper = keeper
        self._wanted = wanted
        self._wrapped = Wrapped()
        self._heard: Heard | None = None
        self._drawn: Drawn | None = None
        self._rewarded: Rewarded | None = None
        self._seen: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._trained: list[Trained] = []
        self._facts: dict[str, Fact] = {}
        self._answers: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._in_loss = False
        self._before: dict[str, torch.Tensor] | None = None
        self._kl = None if wanted.kl is None else KLTerm(trainer, wanted.kl)
        self._recovering = None if wanted.recovery is None else Recovering(wanted.recovery)
        self._verdict = Verdict()
        self._rates: list[float] = []
        self._graph: torch.Tensor | None = None
        with unseen(trainer):
            monitored = wanted.monitor_kl_every > 0 or wanted.kl is not None
            self.reference: Reference | None = reference_of(trainer, monitored=monitored)
        self._wrap()
        self._callback = _Steps(self)
        trainer.add_callback(self._callback)
        setattr(trainer, MARK, self)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Put every method back, and end what is being written."""
        self._wrapped.undo()
        self.trainer.remove_callback(self._callback)
        vars(self.trainer).pop(MARK, None)
        self._keeper.close()

    def _wrap(self) -> None:
        wrap, trainer = self._wrapped.wrap, self.trainer
        wrap(trainer, "_generate", self._on_generate)
        wrap(trainer, "_calculate_rewards", self._on_rewards)
        wrap(trainer, "_generate_and_score_completions", self._on_batch)
        self._score = wrap(trainer, "_get_per_token_logps_and_entropies", self._on_score)
        self._loss = wrap(trainer, "_compute_loss", self._on_loss)
        wrap(trainer.accelerator, "clip_grad_norm_", self._on_norm)

    @property
    def _training(self) -> bool:
        return bool(self.trainer.model.training)

    @property
    def _step(self) -> int:
        """The update that is being made, counted from 1."""
        return int(self.trainer.state.global_step) + 1

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    # what TRL does, with klinic beside it

    def _on_generate(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        lm = policy_of(self.trainer)
        with listening(lm.get_base_model() if is_adapted(lm) else lm) as heard:
            generated = real(*args, **kwargs)
        if self._training:
            with self._timed("klinic"):
                self._drawn = drawn(
                    generated, heard, version=self._step - 1, fingerprint=fingerprint(lm)
                )
        return generated

    def _on_rewards(
        self, real: Any, inputs: Any, prompts: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        found: torch.Tensor = real(inputs, prompts, *args, **kwargs)
        if self._training:
            self._rewarded = rewarded(
                found.detach().cpu().numpy(),
                self.trainer.reward_func_names,
                self.trainer.reward_weights.cpu().numpy(),
                prompts,
                self.trainer.num_generations,
            )
        return found

    def _on_batch(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        if not self._training:
            return batch
        rows = torch.arange(len(batch["completion_ids"]), device=batch["completion_ids"].device)
        batch = {**batch, ROW: rows}
        every = 1 if self._kl is not None else self._wanted.monitor_kl_every
        watched = every and (self._step - 1) % every == 0
        if watched and self.reference is not None and self.trainer.beta == 0:
            with self._timed("klinic_monitor"), unseen(self.trainer):
                size = self.trainer.args.per_device_train_batch_size
                batch[LOGP_REF] = self.reference.logp(self._score, batch, size=size)
        return batch

    def _on_score(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if self._in_loss:
            logp, entropy = found[0], found[1]
            self._seen = logp.detach(), None if entropy is None else entropy.detach()
            self._graph = logp
        return found

    def _on_loss(self, real: Any, model: Any, inputs: Any) -> Any:
        if not self._training or ROW not in inputs:
            return real(model, inputs)
        if not self._trained:
            with self._timed("klinic"):
                self._begin_step(model, inputs)
        self._seen = None
        loss = self._full_loss(model, inputs)
        seen = self._taken()
        if seen is not None and self._drawn is not None and self._rewarded is not None:
            logp, entropy = seen
            self._trained.append(
                Trained(
                    inputs=inputs,
                    logp=logp,
                    entropy=entropy,
                    loss=loss.detach(),
                    drawn=self._drawn,
                    rewarded=self._rewarded,
                )
            )
        return loss

    def _full_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return TRL's loss, with klinic's KL term in the place of its own if there is one."""
        self._in_loss = True
        try:
            if self._kl is None:
                return self._loss(model, inputs)  # type: ignore[no-any-return]
            with self._kl.alone():
                loss = self._loss(model, inputs)
        finally:
            self._in_loss = False
        graph, self._graph = self._graph, None
        assert graph is not None  # noqa: S101 - TRL's loss scores its batch
        return self._kl.add(loss, graph, inputs)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL term, TRL's or klinic's."""
        return float(self.trainer.beta) if self._kl is None else self._kl.coef

    @contextmanager
    def _with_coef(self, coef: float) -> Iterator[None]:
        """Let the KL term have another coefficient for a while."""
        if self._kl is not None:
            with self._kl.held(coef):
                yield
            return
        before, self.trainer.beta = self.trainer.beta, coef
        try:
            yield
        finally:
            self.trainer.beta = before

    def _taken(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return what was seen of the last forward."""
        seen, self._seen = self._seen, None
        return seen

    def _on_norm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        self._facts["grad_norm"] = float(found)
        return found

    # a step, from its first batch to its last

    def _begin_step(self, model: Any, inputs: Any) -> None:
        """Note what holds before the update, and ask what records will not tell."""
        reference, drawn = self.reference, self._drawn
        # an update with completions of before has no weights handed out for it
        fresh = drawn is not None and drawn.version == self._step - 1
        self._facts = {
            "kl_coef": self.kl_coef,
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
        except Exception as error:  # to be asked must never be the end of a run
            what = f"{type(error).__name__}: {error}"
            said = f"A question could not be answered: {what}"
            self._keeper.event(self._step, "probe failed", said)

    def _ask(self, model: Any, inputs: Any) -> None:
        rows = questions.asked_rows(inputs)
        batch = some_rows(inputs, rows)
        if self._step == 1 and self.reference is not None:
            self._verify_reference(batch)
        said = None if self._drawn is None else self._drawn.logp_sampler
        numbers = batch[ROW].tolist()
        asked = questions.Asked(
            trainer=self.trainer,
            model=model,
            score=self._score,
            loss=self._full_loss,
            estimator=self.estimator if self.kl_coef else None,
            coefficient=self._with_coef,
            batch=batch,
            logp_sampler=None if said is None else [said[number] for number in numbers],
        )
        self._answers = questions.ask(asked)

    def _verify_reference(self, batch: Any) -> None:
        """Say whether policy and reference are one before the first update."""
        assert self.reference is not None  # noqa: S101 - asked only with one
        apart = distance_at_start(self.trainer, self._score, self.reference, batch)
        sentence = identity(self.reference, apart, int(trained_on(batch).sum()))
        self._keeper.event(0, "reference", sentence, apart=apart, digest=self.reference.digest)

    @property
    def estimator(self) -> str | None:
        """The name of the KL term in the loss."""
        if self._kl is not None:
            return str(self._kl.section.estimator)
        return describe.estimator_name(self.trainer.args)

    def begin(self) -> None:
        """Write what is known before the first step."""
        trainer = self.trainer
        self._keeper.say(f"Run: {self.folder}")
        if self._kl is not None:
            name = self._kl.section.estimator
            self._keeper.say(f"KL {name}, in the place of TRL's: {ESTIMATORS[name].sentence}")
        self._keeper.begin(
            describe.run_facts(trainer, self.reference, self.estimator),
            describe.recipe_values(trainer, str(self.folder)),
            _texts(trainer),
        )

    def before_update(self) -> None:
        """Note the rate of the update, and some weights in steps that are looked at closely."""
        self._facts["learning_rate"] = float(self.trainer.optimizer.param_groups[0]["lr"])
        if is_time(self._step):
            weights = trained(policy_of(self.trainer))
            self._before = {name: sampled(p.detach()).clone() for name, p in weights.items()}

        if self._recovering is not None:
            self._judge(self._recovering)

    def _judge(self, recovering: Recovering) -> None:
        """Leave the update out, or make it at a lower rate, as it is decided."""
        record = self._record(self._step, self._trained)
        sound = all_finite([p.detach() for p in trained(policy_of(self.trainer)).values()])
        self._verdict = recovering.judge(record, weights_sound=sound)
        if self._verdict.says:
            self._keeper.event(self._step, "trouble", self._verdict.says)
        optimizer = self.trainer.optimizer
        if self._verdict.skip:
            drop_gradients(optimizer)
        if self._verdict.lr_factor != 1:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= self._verdict.lr_factor
            self._facts["learning_rate"] = float(optimizer.param_groups[0]["lr"])

    def after_update(self) -> None:
        """Note how many of those weights the update left as they were."""
        for group, rate in zip(self.trainer.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []
        before, self._before = self._before, None
        if before is None or self._verdict.skip:
            return
        weights = trained(policy_of(self.trainer))
        pairs = [(before[name], sampled(p.detach())) for name, p in weights.items()]
        same = sum(int((a == b).sum()) for a, b in pairs)
        self._facts["unchanged_share"] = same / max(sum(a.numel() for a, _ in pairs), 1)

    def keep(self, step: int) -> None:
        """Write down the step that was made."""
        batches, self._trained = self._trained, []
        if not batches:
            return
        with self._timed("klinic"):
            record = self._record(step, batches)
            metrics = self._metrics_of(record) | self._parse_rate(batches)
        seconds, self._seconds = self._seconds, {}
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        for name in SHOWN:
            if name in metrics:
                self.trainer._metrics["train"][f"klinic/{name}"].append(metrics[name])
        if self._kl is not None:
            self.trainer._metrics["train"]["kl"].append(metrics.get("kl", math.nan))
            self.trainer._metrics["train"]["kl_coef"].append(metrics["kl_coef"])
            self._kl.adapt(record)
        verdict, self._verdict = self._verdict, Verdict()
        metrics["discarded"] = float(verdict.skip)
        self._keeper.keep(record, metrics, self._answers)
        if verdict.stop:
            raise RunStoppedError(f"{self.folder}: {verdict.says}")

    def _record(self, step: int, batches: list[Trained]) -> StepRecord:
        facts = {
            **self._facts,
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
            caches=bool(self.trainer.args.use_vllm),
            round_trip=partial(comes_back, tokenizer) if self._answers else None,
        )

    def _metrics_of(self, record: StepRecord) -> dict[str, float]:
        args = self.trainer.args
        facts = {name: record.facts.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        metrics = {name: float(value) for name, value in facts.items() if value is not None}
        metrics["kl_coef"] = self.kl_coef
        rewards = {
            "reward": record.reward,
            **{f"rewards/{n}/mean": p for n, p in record.reward_parts.items()},
        }
        for name, values in rewards.items():
            if values is not None and np.isfinite(values).any():
                metrics[name] = float(np.nanmean(values))
        metrics |= step_metrics(record)
        metrics |= clip_metrics(
            record,
            clip_low=args.epsilon,
            clip_high=describe.clip_high(args),
            by_sequence=args.importance_sampling_level == "sequence",
        )
        return metrics

    def _parse_rate(self, batches: list[Trained]) -> dict[str, float]:
        """Return the share of completions in which an answer is found, if somebody can tell."""
        parse = self._wanted.parse
        if parse is None:
            return {}
        rows = [(batch.drawn, number) for batch in batches for number in batch.inputs[ROW].tolist()]
        parsed = [parse(drawn.texts[number]) is not None for drawn, number in rows]
        return {"completions/parse_rate": sum(parsed) / max(len(parsed), 1)}

    def shown(self, num: int) -> Iterator[tuple[str, str, float]]:
        """Yield prompt, completion and reward of some completions of the last generation."""
        if self._drawn is None or self._rewarded is None:
            return
        rows = zip(self._rewarded.prompts, self._drawn.texts, self._rewarded.total, strict=True)
        for prompt, text, reward in list(rows)[:num]:
            yield prompt, text, float(reward)

    def hear_log(self, logs: Mapping[str, Any]) -> None:
        """Take the accuracy out of an evaluation, if one of its rewards is it."""
        measured = logs.get(f"eval_rewards/{self._wanted.accuracy}/mean")
        if measured is not None:
            step = int(self.trainer.state.global_step)
            self._keeper.tell(step, {"eval/accuracy": float(measured)})

    def end(self) -> None:
        """Tell how it stands, and end what is being written."""
        self._keeper.end(int(self.trainer.state.global_step))


def _texts(trainer: Any) -> dict[int, str]:
    tokenizer = trainer._tokenizer
    return {number: tokenizer.decode([number]) for number in range(len(tokenizer))}


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Where an update begins and ends."""

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
