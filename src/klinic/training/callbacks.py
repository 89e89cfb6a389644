"""Calls `TrainerCallback` objects of transformers at the events that a run has.

A callback may stop the run, or ask for a checkpoint or an evaluation, through `control`. Events of
epochs, sub-steps and predictions have no counterpart, and a callback that needs one is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from klinic.errors import FunctionError, KlinicError, error_text
from klinic.recipe.recipe import Recipe
from klinic.recipe.validation_messages import format_value
from klinic.runtime.user_code import guard_process

EVENTS = (
    *("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save"),
    "on_train_end",
)
"""Events that are called."""
BEST_METRIC = "eval_reward"
INSTEAD = {
    "on_epoch_begin": "on_step_end, with state.epoch",
    "on_epoch_end": "on_step_end, with state.epoch",
    "on_step_begin": "on_step_end",
    "on_substep_end": "on_step_end",
    "on_pre_optimizer_step": "on_log, whose logs have grad_norm",
    "on_optimizer_step": "on_step_end",
    "on_predict": "on_evaluate",
    "on_prediction_step": "on_evaluate",
    "on_push_begin": "on_save",
}
"""Events that are not called, each with one to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackWishes:
    """What callbacks asked for at the end of a step."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False


def callback_problems(callbacks: Sequence[Any]) -> list[str]:
    """Return a sentence for every callback that cannot be used."""
    problems = []
    for callback in callbacks:
        events = [name for name in INSTEAD if _overrides(callback, name)]
        advice = "; ".join(f"{name}: use {INSTEAD[name]}" for name in events)
        if events:
            problems.append(
                f"callbacks has {_name(callback)}, which needs events that a run does not have "
                f"({advice}). Events here are {', '.join(EVENTS)}."
            )
        elif not any(_overrides(callback, name) for name in EVENTS):
            problems.append(
                f"callbacks has {format_value(callback)}: it must be a TrainerCallback with one of "
                f"{', '.join(EVENTS)}."
            )
    return problems


def _overrides(callback: Any, event: str) -> bool:
    """Whether a callback, or a class of callbacks, does something at an event."""
    from transformers import TrainerCallback

    method = getattr(callback if isinstance(callback, type) else type(callback), event, None)
    return method is not None and method is not getattr(TrainerCallback, event, None)


def _name(callback: Any) -> str:
    return callback.__name__ if isinstance(callback, type) else type(callback).__name__


class CallbackRunner:
    """Callbacks with the state that they are given."""

    def __init__(self, callbacks: Sequence[Any], arguments: Any) -> None:
        from transformers import TrainerControl, TrainerState

        self._callbacks = [c() if isinstance(c, type) else c for c in callbacks]
        self._arguments = arguments
        self._state = TrainerState()
        self._control = TrainerControl()
        self._objects: dict[str, Any] = {}
        self._steps_per_epoch = 1

    def begin(
        self, recipe: Recipe, *, step: int, num_rows: int, model: Any, tokenizer: Any
    ) -> None:
        """Call `on_init_end` and `on_train_begin`; `step` is the last step of a resumed run."""
        self._arguments = self._arguments or recipe_arguments(recipe)
        self._steps_per_epoch = max(1, num_rows // recipe.loop.prompts_per_step)
        self._state.max_steps = recipe.loop.max_steps
        self._state.num_train_epochs = -(-recipe.loop.max_steps // self._steps_per_epoch)
        self._state.logging_steps = 1
        self._state.eval_steps = recipe.loop.eval_every
        self._state.save_steps = recipe.loop.checkpoint_every
        self._objects = {
            "model": model,
            "processing_class": tokenizer,
            **dict.fromkeys(("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")),
        }
        self._set_step(step)
        self._call("on_init_end")
        self._call("on_train_begin")

    def end_step(self, step: int, metrics: Mapping[str, float]) -> CallbackWishes:
        """Call `on_step_end` and `on_log`; return what the callbacks ask for."""
        self._set_step(step)
        control = self._control
        control.should_save = control.should_evaluate = control.should_log = False
        self._call("on_step_end")
        self._log(metrics)
        return CallbackWishes(
            stop=control.should_training_stop,
            save=control.should_save,
            evaluate=control.should_evaluate,
        )

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Call `on_log` and `on_evaluate`; return whether the run should stop."""
        self._set_step(step)
        named = {name.replace("/", "_", 1): value for name, value in metrics.items()}
        self._log(named)
        self._call("on_evaluate", metrics=dict(named))
        self._update_best(named)
        return bool(self._control.should_training_stop)

    def _update_best(self, metrics: Mapping[str, float]) -> None:
        """Keep the best value of `metric_for_best_model`, which early stopping reads."""
        name = getattr(self._arguments, "metric_for_best_model", None) or BEST_METRIC
        value = metrics.get(name, metrics.get(f"eval_{name}"))
        if value is None:
            return
        rises = getattr(self._arguments, "greater_is_better", None)
        sign = -1 if rises is False or (rises is None and name.endswith("loss")) else 1
        best = self._state.best_metric
        if best is None or sign * value > sign * best:
            self._state.best_metric = value
            self._state.best_global_step = self._state.global_step

    def end_save(self, step: int) -> None:
        """Call `on_save`."""
        self._set_step(step)
        self._call("on_save")

    def end(self, step: int) -> None:
        """Call `on_train_end`."""
        self._set_step(step)
        self._call("on_train_end")

    def _set_step(self, step: int) -> None:
        self._state.global_step = step
        self._state.epoch = step / self._steps_per_epoch

    def _log(self, metrics: Mapping[str, float]) -> None:
        logs = {**metrics, "epoch": self._state.epoch}
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._call("on_log", logs=logs)

    def _call(self, event: str, **values: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            name = f"callback {_name(callback)}.{event}"
            try:
                with guard_process(name):
                    control = method(
                        self._arguments, self._state, self._control, **self._objects, **values
                    )
            except (KeyboardInterrupt, KlinicError):
                raise
            except BaseException as error:  # a callback is user code
                raise FunctionError(
                    f"the {name} failed at step {self._state.global_step}: "
                    f"{type(error).__name__}: {error_text(error)}. Repair it, and continue with "
                    "--resume."
                ) from error
            if control is not None:
                self._control = control


def recipe_arguments(recipe: Recipe) -> SimpleNamespace:
    """Return the settings that callbacks read, by their names in transformers."""
    return SimpleNamespace(
        output_dir=recipe.output.dir,
        max_steps=recipe.loop.max_steps,
        learning_rate=recipe.learner.learning_rate,
        per_device_train_batch_size=recipe.learner.micro_batch_size,
        num_generations=recipe.loop.group_size,
        max_completion_length=recipe.sampling.max_new_tokens,
        beta=0.0 if recipe.kl is None else recipe.kl.coef,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps" if recipe.loop.eval_every else "no",
        eval_steps=recipe.loop.eval_every,
        save_strategy="steps",
        save_steps=recipe.loop.checkpoint_every,
        save_total_limit=recipe.loop.keep_checkpoints,
        seed=recipe.seed,
        report_to=list(recipe.output.trackers),
        load_best_model_at_end=False,
        metric_for_best_model=BEST_METRIC,
        greater_is_better=True,
    )
