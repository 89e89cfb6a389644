"""Reads the arguments of TRL's `GRPOConfig` as recipe settings.

A name is an alias (`klinic.recipe.aliases`), converted by a function here, counted in steps and
batches (`klinic.recipe.trl_schedule`), without effect (`UNUSED`: it changes speed, files or logs
and not what is learned), or unavailable (`UNAVAILABLE`: it would change what is learned).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from klinic.recipe.aliases import ALIASES
from klinic.recipe.trl_tables import NEUTRAL, SCHEDULE_NAMES, UNAVAILABLE, UNUSED
from klinic.recipe.validation_messages import format_value

DEFAULT_FOLDERS = (None, "", "trainer_output", "tmp_trainer")
"""Values of `output_dir` that a user did not choose."""
VLLM_PREFIX = "vllm_"
MODEL_KEYS = {
    "trust_remote_code": "model.trust_remote_code",
    "attn_implementation": "attn_implementation",
}
"""Keywords of `from_pretrained` that have a counterpart."""
_DTYPE = ("trained weights are fp32; bf16=True sets the products", ("float32", "auto", "None"))
_PLACEMENT = ("klinic places the model: model.device", ("None", "False", "True"))
UNUSED_OF_MODEL = {
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("use_cache", "low_cpu_mem_usage", "device_map"), _PLACEMENT),
}
"""Other keywords without effect: the reason, and the values that need none."""


@dataclass(slots=True, kw_only=True)
class TrlArguments:
    """The arguments of one call or one `GRPOConfig`, as settings of a recipe."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Recipe keys and aliases with their values; names that TRL does not have pass unchanged."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Arguments that are converted once the rows and the group size are known."""
    origins: dict[str, str] = field(default_factory=dict)
    """The argument from which a key was computed."""
    reward_weights: list[float] | None = None
    unused: dict[str, str] = field(default_factory=dict)
    """Arguments without effect, each with the reason."""
    problems: list[str] = field(default_factory=list)
    """Arguments that cannot be had, each with what to do instead."""


COUNTS = {
    "max_steps": "",
    "warmup_steps": "",
    "save_steps": "save_strategy",
    "eval_steps": "eval_strategy",
}
"""Arguments in steps that are aliases too, and the argument that may change their meaning."""
SET_BY_TRANSFORMERS = frozenset(
    {"accelerator_config", "dataloader_pin_memory", "debug", "disable_tqdm", "logging_dir"}
)
"""Arguments without effect that `TrainingArguments` fills in by itself."""

Converter = Callable[[TrlArguments, Any], None]


def read_trl_arguments(values: Mapping[str, Any]) -> TrlArguments:
    """Return the arguments as settings.

    >>> read_trl_arguments({"scale_rewards": False, "logging_steps": 10}).settings
    {'learner.advantage': 'group_mean'}
    """
    arguments = TrlArguments()
    for name, value in values.items():
        _read_one(arguments, name, plain_value(value))
    for name in _plain_counts(arguments.schedule):
        arguments.settings[name] = arguments.schedule[name]
    _join_loss(arguments)
    if "vllm_server_base_url" in arguments.settings:
        arguments.unused.pop("vllm_mode", None)
    return arguments


def _read_one(arguments: TrlArguments, name: str, value: Any) -> None:
    if name in CONVERTERS:
        if value is not None:
            before = set(arguments.settings)
            CONVERTERS[name](arguments, value)
            arguments.origins |= dict.fromkeys(arguments.settings.keys() - before, name)
    elif name in SCHEDULE_NAMES:
        arguments.schedule[name] = value
    elif name in UNUSED:
        arguments.unused[name] = UNUSED[name]
    elif name in UNAVAILABLE:
        if value is not None and value not in NEUTRAL.get(name, ()):
            arguments.problems.append(f"{name} is {format_value(value)}: {UNAVAILABLE[name]}.")
    else:
        arguments.settings[name] = value


def _plain_counts(schedule: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments in steps that need no conversion, so that a contradiction is seen."""
    for name, strategy in COUNTS.items():
        value = schedule.get(name)
        if type(value) is int and value > 0 and strategy not in schedule:
            yield name


def config_values(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a `GRPOConfig`, and the names of a subclass that have no meaning here.

    Values without effect are left out where they are the default; a mapping is returned as it is.
    """
    if isinstance(config, Mapping):
        return dict(_without_defaults(config)), []
    values: dict[str, Any] = {}
    unread: list[str] = []
    for f in fields(config):
        value = plain_value(getattr(config, f.name))
        if value is None or f.name in SET_BY_TRANSFORMERS:
            continue
        if f.name in UNUSED and value == _default_of(f):
            continue
        if f.name in ALIASES or f.name in known_names():
            values[f.name] = value
        elif value != _default_of(f):
            unread.append(f.name)
    return dict(_without_defaults(values)), unread


def known_names() -> frozenset[str]:
    """Return the names that are read here, without those that are plain aliases."""
    return frozenset({"seed", *CONVERTERS, *SCHEDULE_NAMES, *UNUSED, *UNAVAILABLE})


def is_config(value: Any) -> bool:
    """Whether an object can be read as a `GRPOConfig`: a dataclass object with its names."""
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "output_dir")


def _without_defaults(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leave out the folder that TRL invents, and settings of an engine that is not used."""
    for name, value in values.items():
        if name == "output_dir" and value in DEFAULT_FOLDERS:
            continue
        if name == "beta" and value == 0:  # no KL, as without the argument
            continue
        if name.startswith(VLLM_PREFIX) and not values.get("use_vllm"):
            continue
        yield name, value


def plain_value(value: Any) -> Any:
    """Return the value of an enum, and every other value as it is."""
    return value.value if isinstance(value, Enum) else value


def _default_of(f: "Field[Any]") -> Any:
    value = f.default_factory() if f.default_factory is not MISSING else f.default
    return plain_value(value)


def _join_loss(arguments: TrlArguments) -> None:
    """Set the loss of a ratio of whole completions, which has a name of its own here."""
    if arguments.settings.pop("importance_sampling_level", "token") == "token":
        return
    loss = arguments.settings.get("loss_type", "grpo")
    if loss not in ("grpo", "gspo"):
        arguments.problems.append(
            f"importance_sampling_level is 'sequence' with loss_type {loss!r}: the ratio of a "
            "whole completion is averaged over completions. Set loss_type='grpo', or loss_type="
            "'gspo' alone."
        )
    arguments.settings["loss_type"] = "gspo"


def _read_level(arguments: TrlArguments, value: Any) -> None:
    if value not in ("token", "sequence"):
        arguments.problems.append(
            f"importance_sampling_level is {format_value(value)}: use 'token' or 'sequence'."
        )
    else:
        arguments.settings["importance_sampling_level"] = value


def _read_scale(arguments: TrlArguments, value: Any) -> None:
    modes = {True: "group_std", "group": "group_std", False: "group_mean", "none": "group_mean"}
    if value in modes:
        arguments.settings["learner.advantage"] = modes[value]
    else:
        arguments.problems.append(
            f"scale_rewards is {format_value(value)}: klinic divides by the standard deviation of "
            "the group ('group') or not at all ('none'). learner.advantage='batch' subtracts the "
            "mean of the step as well."
        )


def _read_weights(arguments: TrlArguments, value: Any) -> None:
    arguments.reward_weights = [float(weight) for weight in value]


def _read_fp16(arguments: TrlArguments, value: Any) -> None:
    if value:
        arguments.settings.setdefault("model.dtype", "fp32")
        arguments.unused["fp16"] = "matrix products are fp32; bf16=True is the half precision here"


def _read_scheduler(arguments: TrlArguments, value: Any) -> None:
    name = "constant" if value == "constant_with_warmup" else value
    arguments.settings["lr_scheduler_type"] = name


def _read_optimizer(arguments: TrlArguments, value: Any) -> None:
    if "adamw" not in str(value):
        arguments.problems.append(
            f"optim is {format_value(value)}: klinic trains with AdamW. Leave optim out."
        )
    elif "bit" in str(value) or "paged" in str(value):
        arguments.unused["optim"] = "AdamW has fp32 moments; model.lora_rank makes them small"


def _read_epsilon_of_adam(arguments: TrlArguments, value: Any) -> None:
    if value != 1e-8:
        arguments.problems.append(
            f"adam_epsilon is {format_value(value)}: it is 1e-8 here. Leave it out."
        )


def _read_compile(arguments: TrlArguments, value: Any) -> None:
    arguments.settings["model.compile"] = value


def _read_trust(arguments: TrlArguments, value: Any) -> None:
    arguments.settings["model.trust_remote_code"] = value


def _read_folder(arguments: TrlArguments, value: Any) -> None:
    arguments.settings["output_dir"] = str(value)


def _read_top_k(arguments: TrlArguments, value: Any) -> None:
    arguments.settings["top_k"] = max(0, value) if isinstance(value, int) else value


def _read_kept(arguments: TrlArguments, value: Any) -> None:
    if value == 1:
        arguments.unused["save_total_limit"] = "two checkpoints are kept: one may be damaged"
        value = 2
    arguments.settings["save_total_limit"] = value


def _read_kl_correction(arguments: TrlArguments, value: Any) -> None:
    if value is False:
        arguments.settings["kl.estimator"] = "k3"


def _read_vllm_mode(arguments: TrlArguments, value: Any) -> None:
    if value == "server":
        arguments.unused["vllm_mode"] = "klinic starts its engine; vllm_server_base_url names one"


def _read_push(arguments: TrlArguments, value: Any) -> None:
    if value:
        arguments.unused["push_to_hub"] = (
            "klinic uploads nothing; result.load_model()[0].push_to_hub(NAME) does afterwards"
        )


def _read_sync(arguments: TrlArguments, value: Any) -> None:
    if value:
        arguments.problems.append(
            "sync_ref_model is true: set reference={'reset_every': N}, or reference={'ema': decay} "
            "for an average after every step."
        )


def _read_model_kwargs(arguments: TrlArguments, value: Any) -> None:
    for name, inner in dict(value).items():
        written, plain = f"model_init_kwargs[{name!r}]", plain_value(inner)
        if name in MODEL_KEYS:
            if plain is not None:
                arguments.settings[MODEL_KEYS[name]] = plain
        elif name in UNUSED_OF_MODEL:
            reason, harmless = UNUSED_OF_MODEL[name]
            if str(plain).removeprefix("torch.") not in harmless:
                arguments.unused[written] = reason
        elif plain not in (None, "main"):
            arguments.problems.append(
                f"{written} is {format_value(plain)}: klinic loads a model without it. Load the "
                "model yourself with from_pretrained, and pass it as model."
            )


CONVERTERS: dict[str, Converter] = {
    "adam_epsilon": _read_epsilon_of_adam,
    "fp16": _read_fp16,
    "importance_sampling_level": _read_level,
    "lr_scheduler_type": _read_scheduler,
    "model_init_kwargs": _read_model_kwargs,
    "optim": _read_optimizer,
    "output_dir": _read_folder,
    "push_to_hub": _read_push,
    "reward_weights": _read_weights,
    "save_total_limit": _read_kept,
    "scale_rewards": _read_scale,
    "sync_ref_model": _read_sync,
    "top_k": _read_top_k,
    "torch_compile": _read_compile,
    "trust_remote_code": _read_trust,
    "use_bias_correction_kl": _read_kl_correction,
    "vllm_mode": _read_vllm_mode,
}
