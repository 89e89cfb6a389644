"""Turns TRL's batches and epochs into the steps of a recipe.

TRL counts completions per device, klinic prompts per step: a step here is one optimizer update of
TRL (device batch x accumulation), in whole groups. Epochs, and intervals that are fractions or
`epoch`, become numbers of steps once the number of rows is known.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from klinic.recipe.recipe import Recipe
from klinic.recipe.validation_messages import format_value

NUMBERS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"),
    *("steps_per_generation", "num_train_epochs", "max_steps", "warmup_ratio", "warmup_steps"),
    *("save_steps", "eval_steps", "logging_steps"),
)
DEFAULT_DEVICE_BATCH = 8  # of TRL
DEFAULT_INTERVAL = 500  # steps between checkpoints, of TRL


class StepPlanner:
    """Computes recipe keys from batches, epochs and fractions.

    `recipe` has the group size, and the keys that were set explicitly, which win.
    """

    def __init__(
        self, schedule: Mapping[str, Any], recipe: Recipe, count_rows: Callable[[], int]
    ) -> None:
        self._recipe = recipe
        self._count_rows = count_rows
        self.settings: dict[str, Any] = {}
        self.unused: dict[str, str] = {}
        self.remarks: list[str] = []
        self.problems: list[str] = []
        self._values = {name: value for name, value in schedule.items() if value is not None}
        for name in NUMBERS:
            value = self._values.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.problems.append(f"{name} is {format_value(value)}: it must be a number.")
                del self._values[name]

    def plan(self) -> "StepPlanner":
        """Fill in the settings, the arguments without effect, remarks and problems."""
        self._plan_batch()
        self._plan_length()
        self._plan_warmup()
        self._plan_checkpoints()
        self._plan_evaluations()
        self._plan_logging()
        return self

    @property
    def _group_size(self) -> int:
        return self._recipe.loop.group_size

    @property
    def _prompts_per_step(self) -> int:
        return int(self.settings.get("loop.prompts_per_step", self._recipe.loop.prompts_per_step))

    @cached_property
    def _steps_per_epoch(self) -> int:
        return max(1, self._count_rows() // self._prompts_per_step)

    @property
    def _max_steps(self) -> int:
        return int(self.settings.get("loop.max_steps", self._recipe.loop.max_steps))

    def _plan_batch(self) -> None:
        device_batch = self._values.get("per_device_train_batch_size")
        accumulation = self._values.get("gradient_accumulation_steps")
        if device_batch is not None:
            self.settings["learner.micro_batch_size"] = int(device_batch)
        if "prompts_per_step" in self._recipe.loop.model_fields_set:
            if accumulation is not None:
                self.unused["gradient_accumulation_steps"] = "prompts_per_step sets the batch"
            return
        if device_batch is None and accumulation is None:
            return
        num = int((device_batch or DEFAULT_DEVICE_BATCH) * (accumulation or 1))
        self._set_prompts(self._completions_per_update(num))

    def _completions_per_update(self, num: int) -> int:
        """Return the completions of one update: of one TRL update, or of a larger generation."""
        steps = self._values.get("steps_per_generation", 0)
        device_batch = self._values.get("per_device_train_batch_size") or DEFAULT_DEVICE_BATCH
        generated = int(self._values.get("generation_batch_size") or steps * device_batch)
        if generated <= num:
            return num
        if num % self._group_size:
            self.unused["steps_per_generation"] = "one update is made from all sampled completions"
            return generated
        self.unused["steps_per_generation"] = "every update samples its own completions"
        return num

    def _set_prompts(self, num_completions: int) -> None:
        prompts = math.ceil(num_completions / self._group_size)
        if prompts * self._group_size != num_completions:
            self.remarks.append(
                f"{num_completions} completions are not whole groups of {self._group_size}: a step "
                f"has {prompts} x {self._group_size}"
            )
        self.settings["loop.prompts_per_step"] = prompts

    def _plan_length(self) -> None:
        steps, epochs = self._values.get("max_steps"), self._values.get("num_train_epochs")
        if steps is not None and steps > 0:
            self.settings["loop.max_steps"] = int(steps)
        elif epochs is not None and "max_steps" not in self._recipe.loop.model_fields_set:
            self.settings["loop.max_steps"] = max(1, math.ceil(epochs * self._steps_per_epoch))

    def _plan_warmup(self) -> None:
        steps, ratio = self._values.get("warmup_steps"), self._values.get("warmup_ratio", 0)
        if steps is not None and steps >= 1:
            self.settings["learner.warmup_steps"] = int(steps)
        elif steps is not None or ratio:
            self.settings["learner.warmup_steps"] = math.ceil((steps or ratio) * self._max_steps)

    def _plan_checkpoints(self) -> None:
        strategy = self._values.get("save_strategy")
        if strategy == "best":
            self.problems.append(
                "save_strategy is 'best': checkpoints are saved at intervals. Use 'steps', 'epoch' "
                "or 'no'."
            )
        if strategy is None and "save_steps" not in self._values:
            return
        steps = self._values.get("save_steps", DEFAULT_INTERVAL)
        self.settings["loop.checkpoint_every"] = self._interval(strategy, steps)

    def _plan_evaluations(self) -> None:
        strategy = self._values.get("eval_strategy", self._values.get("evaluation_strategy"))
        steps = self._values.get("eval_steps", self._values.get("logging_steps", 0))
        if strategy is None and "eval_steps" not in self._values:
            return
        self.settings["loop.eval_every"] = self._interval(strategy, steps)

    def _interval(self, strategy: str | None, steps: int | float) -> int:
        """Return the steps between two checkpoints or evaluations; 0 for none but the last."""
        if strategy == "no":
            return 0
        if strategy == "epoch":
            return self._steps_per_epoch
        return math.ceil(steps * self._max_steps) if 0 < steps < 1 else int(steps)

    def _plan_logging(self) -> None:
        steps = self._values.get("logging_steps")
        if steps not in (None, 1):
            self.unused["logging_steps"] = "every step is logged"
        if self._values.get("log_completions"):
            every = int(steps or 1) if (steps or 1) >= 1 else 1
            self.settings["loop.show_completions_every"] = every
