"""Turns the arguments of `klinic.train(...)` into a recipe and the Python objects beside it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError
from klinic.evidence.run_facts import RECIPE
from klinic.recipe.aliases import ALIASES
from klinic.recipe.keys import optional_sections, recipe_fields
from klinic.recipe.loading import LoadedRecipe, from_mappings
from klinic.recipe.recipe import Recipe
from klinic.recipe.trl_arguments import (
    TrlArguments,
    config_values,
    is_config,
    known_names,
    read_trl_arguments,
)
from klinic.recipe.trl_schedule import StepPlanner
from klinic.recipe.validation_messages import format_value
from klinic.training import checkpoint
from klinic.training.callbacks import CallbackRunner, callback_problems
from klinic.training.python_arguments import (
    Reading,
    as_list,
    read_adapter,
    read_model,
    read_rewards,
    take_misspelt,
    take_unavailable,
)
from klinic.training.source import FROM_PYTHON, HELD_OUT_FROM_PYTHON, PythonInputs, count_rows
from klinic.training.train import StartMode

ORIGINS = {
    "learner.micro_batch_size": "per_device_train_batch_size",
    "loop.prompts_per_step": "completions of one update / num_generations",
    "loop.max_steps": "num_train_epochs",
    "learner.warmup_steps": "warmup_ratio",
    "loop.checkpoint_every": "save_strategy",
    "loop.eval_every": "eval_strategy",
    "loop.show_completions_every": "log_completions",
}
"""Arguments from which keys are computed."""


class TrainCall:
    """The arguments of one call, read one kind after the other; problems are collected."""

    def __init__(
        self, config: Any, settings: Mapping[str, Any], *, arguments: Iterable[str] = ()
    ) -> None:
        """Read `args` and the other settings; `arguments` are the names that the call has."""
        keywords = dict(settings)
        self._reading = Reading()
        take_unavailable(keywords, self._reading)
        take_misspelt(keywords, {*arguments, *known_names()}, self._reading)
        values = self._read_config(config)
        self._overwrite = bool(values.pop("overwrite_output_dir", False))
        self._keywords = read_trl_arguments(keywords)
        if "num_train_epochs" in self._keywords.schedule:
            values.pop("max_steps", None)  # that of the call wins
        self._config = read_trl_arguments(values)
        self._config_object = config if is_config(config) else None
        self._computed: dict[str, Any] = {}
        self._remarks: list[str] = []
        self._model: Any = None
        self._tokenizer: Any = None
        self._rows: Any = None
        self._held_out_rows: Any = None
        self._rewards: list[tuple[Any, float]] = []
        self._has_rewards = False
        self._callbacks: list[Any] = []

    def _read_config(self, config: Any) -> dict[str, Any]:
        if config is None:
            return {}
        if not isinstance(config, Mapping) and not is_config(config):
            self._reading.problems.append(
                f"args is {format_value(config)}: it must be a GRPOConfig, or a mapping of its "
                "arguments."
            )
            return {}
        values, unread = config_values(config)
        if unread:
            self._reading.unused[", ".join(unread)] = "no argument of GRPOConfig"
        return values

    def read_start(self, checkpoint_path: Any, *, overwrite: bool, resume: bool) -> StartMode:
        """Return how the run starts; a path names the folder of the run to resume."""
        if isinstance(checkpoint_path, str | Path):
            self._read_resume_folder(Path(checkpoint_path).expanduser())
        if resume or checkpoint_path:
            return "resume"
        return "over" if overwrite or self._overwrite else "new"

    def _read_resume_folder(self, path: Path) -> None:
        is_checkpoint = path.parent.name == checkpoint.FOLDER
        folder = path.parent.parent if is_checkpoint else path
        if not (folder / RECIPE).is_file():
            self._reading.problems.append(
                f"resume_from_checkpoint is {path}: there is no run of klinic. Give the folder of "
                "a run, or True for the newest run. To start from the weights of another trainer, "
                f"pass model={str(path)!r}."
            )
        elif is_checkpoint and checkpoint.parse_step(path) != max(
            checkpoint.checkpoint_steps(folder), default=0
        ):
            self._reading.problems.append(
                f"resume_from_checkpoint is {path}: a run continues from its newest checkpoint. To "
                f"start a new run from this one, pass model={str(path / 'model')!r}."
            )
        else:
            self._reading.settings["output.dir"] = str(folder)

    def read_data(self, rows: Any, held_out_rows: Any) -> None:
        """Read `train_dataset` and `eval_dataset`: rows, or the name of a file or a dataset."""
        settings = self._reading.settings
        if isinstance(rows, str | Path):
            settings["data.path"] = str(rows)
        elif rows is not None:
            settings["data.path"] = FROM_PYTHON
            self._rows = rows
        if isinstance(held_out_rows, str | Path):
            settings["eval.path"] = str(held_out_rows)
        elif held_out_rows is not None:
            settings["eval.path"] = HELD_OUT_FROM_PYTHON
            self._held_out_rows = held_out_rows

    def read_model(self, model: Any, tokenizer: Any, adapter: Any) -> None:
        """Read the model, its tokenizer and its new adapter."""
        self._model = read_model(model, tokenizer, self._reading)
        self._tokenizer = tokenizer
        read_adapter(adapter, model, self._reading)

    def read_rewards(self, functions: Any, weights: Any) -> None:
        """Read reward functions and their weights."""
        for arguments in (self._keywords, self._config):
            weights = arguments.reward_weights if weights is None else weights
        self._has_rewards = bool(as_list(functions))
        self._rewards = read_rewards(functions, weights, self._reading)

    def read_callbacks(self, callbacks: Any) -> None:
        """Read the callbacks."""
        self._callbacks = as_list(callbacks)
        self._reading.problems += callback_problems(self._callbacks)

    def inputs(self) -> PythonInputs:
        """Return the Python objects of the call."""
        return PythonInputs(
            reward_functions=[function for function, _ in self._rewards],
            reward_weights=[weight for _, weight in self._rewards],
            rows=self._rows,
            held_out_rows=self._held_out_rows,
            model=self._model,
            tokenizer=self._tokenizer,
            callbacks=CallbackRunner(self._callbacks, self._config_object)
            if self._callbacks
            else None,
        )

    def resolve(self) -> LoadedRecipe:
        """Return the recipe; raise one error that lists every problem."""
        keywords = {**self._keywords.settings, **self._reading.settings}
        sources = (self._config.settings, keywords)
        loaded = self._load(sources)
        schedule = {**self._config.schedule, **self._keywords.schedule}
        if not schedule:
            return loaded
        planner = StepPlanner(schedule, loaded.recipe, lambda: self._count_rows(loaded.recipe))
        plan = planner.plan()
        if plan.problems:
            raise ConfigError("\n".join(plan.problems))
        self._computed, self._remarks = plan.settings, plan.remarks
        self._reading.unused |= plan.unused
        loaded = from_mappings(plan.settings, *sources)
        self._refuse_few_rows(loaded.recipe)
        return loaded

    def _load(self, sources: Sequence[Mapping[str, Any]]) -> LoadedRecipe:
        """Return the recipe before its steps are known; raise one error with all problems."""
        parts: tuple[Reading | TrlArguments, ...] = (self._reading, self._config, self._keywords)
        problems = [problem for part in parts for problem in part.problems]
        if not any(_names_data(source) for source in sources):
            problems.append(
                "train_dataset is missing: pass rows with a `prompt`, the name of a file or of a "
                "hub dataset, or task='arithmetic'."
            )
            sources = [*sources, {"task": "arithmetic"}]  # to find the other problems
        if not self._has_rewards and not any(_names_rewards(source) for source in sources):
            problems.append(
                "reward_funcs is missing: pass a function reward(completions, **columns) that "
                "returns one number per completion."
            )
        try:
            loaded = from_mappings(*sources)
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        return loaded

    def _refuse_few_rows(self, recipe: Recipe) -> None:
        """Refuse a batch of more prompts than rows, in the words of the call."""
        num, rows = recipe.loop.prompts_per_step, self._rows
        if (
            "loop.prompts_per_step" in self._computed
            and isinstance(rows, Sized)
            and len(rows) < num
        ):
            raise ConfigError(
                f"a step has {num} prompts (per_device_train_batch_size x "
                f"gradient_accumulation_steps / num_generations {recipe.loop.group_size}), and "
                f"train_dataset has {len(rows)} rows: a step would repeat a prompt. Use a smaller "
                "batch, or more rows."
            )

    def _count_rows(self, recipe: Recipe) -> int:
        if self._rows is not None and not hasattr(self._rows, "__len__"):
            self._rows = list(self._rows)  # an iterator can be read once
        return count_rows(recipe, self._rows)

    def describe(self, loaded: LoadedRecipe) -> Iterator[str]:
        """Yield one line about renamed arguments, one about those without effect, and remarks."""
        origins = {key: s.written_as for key, s in loaded.renamed.items()}
        for part in (self._config, self._keywords):
            origins |= {key: name for key, name in part.origins.items() if key in recipe_fields()}
        origins |= {key: ORIGINS[key] for key in self._computed if key not in origins}
        adapter = (key for key in self._reading.settings if key.startswith("model.lora_"))
        origins |= dict.fromkeys(adapter, "peft_config")
        renamed = [
            f"{key}={_plain(value)} ({name})"
            for key, name in origins.items()
            if _changes_default(key, value := _value_of(loaded.recipe, key))
        ]
        if renamed:
            yield f"Settings: {', '.join(renamed)}"
        if unused := self._unused():
            yield f"Without effect: {unused}"
        yield from (*self._remarks, *loaded.remarks)

    def _unused(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for part in (self._config, self._keywords, self._reading):
            for name, reason in part.unused.items():
                by_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def _names_data(settings: Mapping[str, Any]) -> bool:
    """Whether settings have a source of prompts, under any name."""
    return any(
        name.startswith(("data", "task")) or ALIASES.get(name) in ("data.path", "data.task")
        for name in settings
    )


def _names_rewards(settings: Mapping[str, Any]) -> bool:
    """Whether settings have rewards, or a task that brings its own."""
    return any(ALIASES.get(name, name) in ("rewards", "data.task", "data") for name in settings)


def _changes_default(key: str, value: Any) -> bool:
    """Whether a setting differs from a recipe without it; those of `kl` also switch it on."""
    field = recipe_fields().get(key)
    optional = key.partition(".")[0] in optional_sections()
    return value is not None and (field is None or optional or value != field.default)


def _value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key; None in a section that is off."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return value if isinstance(value, str) and value.isprintable() else format_value(value)
