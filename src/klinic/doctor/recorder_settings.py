"""The settings that `klinic.Recorder` takes, and run.json from them.

Every setting defaults to None, which means unknown: run.json holds only what the loop stated.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ValidationError

from klinic.doctor.foreign_run_log import DOCTOR_MODES
from klinic.errors import ConfigError
from klinic.evidence.batch_arrays import to_array
from klinic.evidence.run_facts import SHARED_FORWARD
from klinic.maths.masked import Aggregation
from klinic.recipe.section import Count, CountOrZero, Section, within
from klinic.recipe.sections import AdvantageName, EstimatorName, LossName
from klinic.recipe.validation_messages import EXPECTED, format_value

DTypeName = Literal["fp32", "bf16", "fp16"]
LogprobMode = Literal["processed", "raw"]
ReferenceName = Literal["start", "path"]
DoctorMode = Literal["tell", "stop", "none"]

Fraction = Annotated[float, within("it is a probability", low=0, high=1)]
TopK = Annotated[int, within("-1 and 0 switch it off", low=-1)]
ClipLow = Annotated[float, within("the ratio is held above 1 - clip_low", above=0, high=1)]
KLTarget = Annotated[float, within("it is the KL to hold, in nats per token", above=0)]
WeightCap = Annotated[float, within("it bounds the importance weight", above=0)]
ClipHigh = Annotated[float, within("the ratio is held below 1 + clip_high", above=0)]

NAMES_ELSEWHERE = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "ppo": "grpo",
    "rloo": "leave_one_out",
    "low_var_kl": "k3",
    "mse": "k2",
}
"""Names that other trainers use, and klinic's."""


class RecorderSettings(Section):
    """The settings of a run, as far as its loop knows them; None: unknown."""

    temperature: Annotated[float, within("it divides the logits", low=0)] | None = None
    """Temperature of the sampler."""
    top_p: Annotated[float, within("it is a probability", above=0, high=1)] | None = None
    """Top-p of the sampler; 1: off."""
    top_k: TopK | None = None
    """Top-k of the sampler; 0: off."""
    min_p: Fraction | None = None
    """Min-p of the sampler; 0: off."""
    repetition_penalty: Annotated[float, within("it is a factor", above=0)] | None = None
    """Repetition penalty of the sampler; 1: off."""
    max_new_tokens: Count | None = None
    """Largest number of tokens of a completion."""
    logprob_mode: LogprobMode | None = None
    """Distribution of `logp_sampler`. `processed`: the one that was sampled from, after temperature
    and truncation; `raw`: the softmax of the unprocessed logits."""
    eos_ids: list[CountOrZero] | None = None
    """Token ids that end a completion; `finish_reason` is derived from them unless passed."""
    pad_id: CountOrZero | None = None
    """Token id of the padding."""
    vocabulary_size: Count | None = None
    """Number of token ids."""
    advantage: AdvantageName | None = None
    """Advantage estimator: `group_mean` (reward minus the mean of its group), `leave_one_out`
    (minus the mean of the others), `group_std` (`group_mean` over the standard deviation of the
    group, with n or n - 1), `batch` (mean and deviation of the whole batch), `none` (reward)."""
    group_size: Count | None = None
    """Completions per prompt. Groups with fewer rows in a step are left out by the checks that need
    whole groups; if unknown, the most frequent size counts as whole."""
    loss: LossName | None = None
    """Policy loss; leave it out for a loss of your own."""
    aggregation: Aggregation | None = None
    """Average of the loss over tokens: `token_mean` (over all trained tokens), `sequence_mean`
    (over the tokens of a row, then over rows), `constant` (divided by a fixed length)."""
    clip_low: ClipLow | None = None
    """The ratio is clipped at 1 - clip_low."""
    clip_high: ClipHigh | None = None
    """The ratio is clipped at 1 + clip_high; unknown: as `clip_low`."""
    kl_estimator: EstimatorName | None = None
    """Estimator of the KL term."""
    kl_target: KLTarget | None = None
    """KL that a controller of the coefficient holds, in nats per token; None: no controller, or
    unknown."""
    reference: ReferenceName | None = None
    """The policy that `logp_ref` is of: `start` (the policy as it started), `path` (another model,
    on purpose)."""
    reference_sync_every: Count | None = None
    """Updates between two copies of the policy into the reference, on purpose; None: it is frozen,
    or unknown."""
    reference_ema: Fraction | None = None
    """Fraction of the reference that is kept when the policy is mixed into it, on purpose; the rest
    is the policy. None: it is frozen, or unknown."""
    importance_cap: WeightCap | None = None
    """Largest importance weight exp(logp_old - logp_sampler) that multiplies the policy term of a
    token (truncated importance sampling); None: none, or unknown."""
    dtype: DTypeName | None = None
    """Dtype of the forward passes: `fp32`, `bf16` or `fp16`. Limits of rounding are those of bf16
    unless it is fp32."""
    sampler_dtype: DTypeName | None = None
    """Dtype of the sampler's forward passes: `fp32`, `bf16` or `fp16`; unknown: as `dtype`."""
    dropout: Annotated[float, within("it is a probability", low=0, below=1)] | None = None
    """Largest dropout probability of the model."""
    num_experts: CountOrZero | None = None
    """Experts of a mixture-of-experts layer; 0: the model has none."""
    untrained: bool | None = None
    """Whether the run starts from random weights on purpose."""
    max_version_lag: CountOrZero | None = None
    """Largest number of updates between the weights that sampled a generation and those of the
    learner at its first update on it; 0: the loop waits for every generation."""
    updates_per_generation: Count | None = None
    """Updates on one generation, each recorded by `record_step`: mini-batches times epochs. If
    unknown, the steps between two calls of `record_samples` are counted."""
    shared_forward: bool | None = None
    """Whether `logp_old` is the detached `logp` of the same forward pass, as in a loop with one
    update per generation; `record_step` then needs only `logp`."""
    max_steps: Count | None = None
    """Number of updates that the run is planned for."""
    warmup_steps: CountOrZero | None = None
    """Updates of the warm-up of the learning rate; 0: no warm-up."""
    seed: int | None = None
    """Seed of the random streams."""
    trainer: str | None = None
    """Name of the trainer that runs the loop: the fixes of `trl`, `verl` and `nemo-rl` name its
    settings."""
    versions: dict[str, str] | None = None
    """Versions of libraries by name, that of the trainer included, such as `{'verl': '0.9.1'}`."""

    def run_facts(self) -> dict[str, Any]:
        """Return the contents of run.json, without unknown values."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
        facts = {
            "trainer": self.trainer,
            "versions": self.versions,
            "seed": self.seed,
            "sampling": _stated({name: getattr(self, name) for name in names}),
            "logprob_mode": self.logprob_mode,
            "eos_ids": self.eos_ids,
            "declared_eos_ids": self.eos_ids,
            "pad_id": self.pad_id,
            "vocabulary_size": self.vocabulary_size,
            "policy": _stated(
                {
                    "dtype": self.dtype,
                    "dropout": self.dropout,
                    "num_experts": self.num_experts,
                    "untrained": self.untrained,
                }
            ),
            "sampler": _stated(
                {
                    "dtype": self.sampler_dtype or self.dtype,
                    "max_version_lag": self.max_version_lag,
                }
            ),
            "estimator": self.kl_estimator,
            "kl_target": self.kl_target,
            "reference": self._reference_facts(),
            "loss": self._loss_facts(),
            "advantage": self.advantage,
            "group_size": self.group_size,
            "updates_per_generation": self.updates_per_generation,
            "max_steps": self.max_steps,
            "warmup_steps": self.warmup_steps,
            "logp_old": {None: None, True: SHARED_FORWARD, False: "scored"}[self.shared_forward],
        }
        return _stated(facts)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The clip range below and above 1; None if unknown."""
        if self.clip_low is None:
            return None
        return self.clip_low, self.clip_low if self.clip_high is None else self.clip_high

    def _loss_facts(self) -> dict[str, Any] | None:
        clip_low, clip_high = self.clip_range or (None, self.clip_high)
        return (
            _stated(
                {
                    "name": self.loss,
                    "aggregation": self.aggregation,
                    "clip_low": clip_low,
                    "clip_high": clip_high,
                    "importance_cap": self.importance_cap,
                }
            )
            or None
        )

    def _reference_facts(self) -> dict[str, Any] | None:
        return (
            _stated(
                {
                    "wanted": self.reference,
                    "sync_every": self.reference_sync_every,
                    "ema": self.reference_ema,
                }
            )
            or None
        )


def read_settings(given: Mapping[str, Any]) -> RecorderSettings:
    """Return the settings; raise `ConfigError` with every argument that cannot be one.

    >>> read_settings({"loss": "grpoo"})
    Traceback (most recent call last):
    klinic.errors.ConfigError: `loss` is 'grpoo'. Did you mean grpo? Use one of grpo, dr_grpo, \
bnpo, dapo, gspo, cispo, or leave it out: unknown is the default.
    """
    try:
        return RecorderSettings(**{name: _to_plain(value) for name, value in given.items()})
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise ConfigError(" ".join(_error_sentence(problem) for problem in problems)) from None


def refuse_unknown_mode(doctor: str) -> None:
    """Raise `ConfigError` unless the name is a mode of the doctor."""
    if doctor not in DOCTOR_MODES:
        offered = offer_names(doctor, DOCTOR_MODES)
        raise ConfigError(f"`doctor` is {format_value(doctor)}. {offered}.")


def check_token_texts(texts: Any) -> dict[int, str]:
    """Return the texts of the token ids; raise `ConfigError` if it is no such mapping."""
    if texts is None:
        return {}
    if not isinstance(texts, Mapping) or not all(
        isinstance(number, int) and isinstance(text, str) for number, text in texts.items()
    ):
        raise ConfigError(
            f"`token_texts` is {format_value(texts)}. Pass a mapping from token ids to their "
            "texts, such as {5: 'the'}."
        )
    return dict(texts)


def new_run_folder(folder: Path) -> Path:
    """Create the folder of a run; raise `ConfigError` if it has files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Give the folder of a new run.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty, and its records would mix with those of this run. "
            "Give the folder of a new run."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def offer_names(value: Any, names: Sequence[str]) -> str:
    """Return the offered names, led by the one that a misspelt name is nearest to.

    >>> offer_names("torch.bfloat16", ["fp32", "bf16"])
    'Did you mean bf16? Use one of fp32, bf16'
    """
    is_name = isinstance(value, str) or type(value).__module__ == "torch"  # such as torch.float32
    name = str(value).removeprefix("torch.").lower() if is_name else ""
    near = [NAMES_ELSEWHERE.get(name, ""), *get_close_matches(name, names, n=1, cutoff=0.5)]
    guess = next((f"Did you mean {word}? " for word in near if word in names), "")
    return f"{guess}Use one of {', '.join(names)}"


def _error_sentence(problem: Any) -> str:
    name, value, kind = str(problem["loc"][0]), problem["input"], problem["type"]
    shown = f"`{name}` is {format_value(value)}"
    if kind == "literal_error":
        words = [word for choice in get_args(_annotation(name)) for word in get_args(choice)]
        return f"{shown}. {offer_names(value, words)}, or leave it out: unknown is the default."
    expected = "Pass a list of token ids" if kind == "list_type" else EXPECTED.get(kind)
    if kind == "value_error":
        expected = str(problem["ctx"]["error"])
    return f"{shown}: {expected or problem['msg']}."


def _annotation(name: str) -> Any:
    return RecorderSettings.model_fields[name].annotation


def _to_plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy and torch as plain numbers and lists."""
    if isinstance(value, tuple | set | frozenset | range):
        return list(value)
    return to_array(value).tolist() if hasattr(value, "tolist") else value


def _stated(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
