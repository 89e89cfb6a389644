"""verl's configuration as the settings of `klinic.Recorder` (read in verl 0.9.1).

What has no counterpart in klinic is left out: the checks that need it then return `no data`.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, runtime_checkable

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half"), "fp16"),
}
KL_IN_LOSS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+", "kl+", "k1+"), "k2"),  # + : the gradient of k2
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3_plus"),
    "abs": "abs",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
LOSS_OF_AGGREGATION = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
LOGPROB_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
LIBRARIES = ("verl", "torch", "transformers", "ray", "vllm", "sglang")


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a tokenizer of transformers that a run's settings need."""

    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int:
        """Return the number of ids."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        ...


class VerlConfig:
    """Reads verl's configuration by its dotted keys; a missing key is None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value: Any = self._values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    @property
    def has_kl_loss(self) -> bool:
        """Whether a KL term is part of the loss."""
        return bool(self[f"{ACTOR}.use_kl_loss"])

    @property
    def has_kl_reward(self) -> bool:
        """Whether a KL is subtracted from the rewards."""
        return bool(self["algorithm.use_kl_in_reward"])

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL term; 0 without one."""
        if self.has_kl_loss:
            return float(self[f"{ACTOR}.kl_loss_coef"] or 0.0)
        return float(self["algorithm.kl_ctrl.kl_coef"] or 0.0) if self.has_kl_reward else 0.0

    @property
    def copies_sampler(self) -> bool:
        """Whether `old_log_probs` are the sampler's own, so that the learner's are unknown."""
        return bool(self[f"{CORRECTION}.bypass_mode"])

    @property
    def rejects_samples(self) -> bool:
        """Whether rows or tokens far from the sampler leave the loss after scoring."""
        return self[f"{CORRECTION}.rollout_rs"] is not None

    @property
    def truncates_sampling(self) -> bool:
        """Whether a token may be the only candidate: then its log-prob is 0 without certainty."""
        temperature, top_p = self[f"{ROLLOUT}.temperature"], self[f"{ROLLOUT}.top_p"]
        return temperature == 0 or (top_p or 1) < 1 or (self[f"{ROLLOUT}.top_k"] or 0) > 0

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps on the batch of a step; None if unknown."""
        batch, mini = self["data.train_batch_size"], self[f"{ACTOR}.ppo_mini_batch_size"]
        if not batch or not mini:
            return None
        return int(-(-batch // mini) * (self[f"{ACTOR}.ppo_epochs"] or 1))


def recorder_settings(
    config: VerlConfig,
    tokenizer: Tokenizer,
    *,
    eos_ids: Sequence[int] = (),
    max_steps: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `klinic.Recorder` that describe the run.

    `eos_ids` are the end tokens of the model besides that of its tokenizer.
    """
    return {
        "trainer": "verl",
        "versions": library_versions(),
        **_sampling(config),
        **_tokens(config, tokenizer, eos_ids),
        **_loss(config),
        "dtype": _learner_dtype(config),
        "sampler_dtype": DTYPES.get(str(config[f"{ROLLOUT}.dtype"])),
        "max_version_lag": _max_version_lag(config),
        "updates_per_generation": 1,  # a step is recorded once, whatever its mini-batches
        "max_steps": max_steps,
        "warmup_steps": _warmup_steps(config, max_steps),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries of a verl run."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _sampling(config: VerlConfig) -> dict[str, Any]:
    return {
        "temperature": _to_float(config[f"{ROLLOUT}.temperature"]),
        "top_p": _to_float(config[f"{ROLLOUT}.top_p"]),
        "top_k": config[f"{ROLLOUT}.top_k"],
        "repetition_penalty": 1.0,  # verl's agent loops pass no other
        "max_new_tokens": config["data.max_response_length"],
        "logprob_mode": LOGPROB_MODES.get(str(config[f"{ROLLOUT}.logprobs_mode"])),
        "group_size": config[f"{ROLLOUT}.n"],
    }


def _tokens(config: VerlConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Return end tokens, padding and texts.

    The ends of turns inside a row are known as such by the sampler's log-probs only.
    """
    is_single_turn = (
        config[f"{ROLLOUT}.agent.default_agent_loop"] == "single_turn_agent"
        and not config[f"{ROLLOUT}.multi_turn.enable"]
    )
    has_emitters = bool(config[f"{ROLLOUT}.calculate_log_probs"]) and not config.rejects_samples
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends = list(dict.fromkeys([*own, *eos_ids]))
    return {
        "eos_ids": ends if ends and (is_single_turn or has_emitters) else None,
        "pad_id": tokenizer.pad_token_id,
        "vocabulary_size": len(tokenizer),
        "token_texts": {number: tokenizer.decode([number]) for number in range(len(tokenizer))},
    }


def _loss(config: VerlConfig) -> dict[str, Any]:
    aggregation = AGGREGATIONS.get(str(config[f"{ACTOR}.loss_agg_mode"]))
    mode = config[f"{ACTOR}.policy_loss.loss_mode"]
    loss = LOSS_OF_AGGREGATION.get(aggregation or "") if mode == "vanilla" else None
    clip = config[f"{ACTOR}.clip_ratio"]
    low, high = config[f"{ACTOR}.clip_ratio_low"], config[f"{ACTOR}.clip_ratio_high"]
    return {
        "loss": "gspo" if mode == "gspo" else loss,
        "aggregation": aggregation,
        "clip_low": _to_float(clip if low is None else low),
        "clip_high": _to_float(clip if high is None else high),
        "kl_estimator": _estimator(config),
        "advantage": _advantage(config),
    }


def _to_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _estimator(config: VerlConfig) -> str | None:
    if config.has_kl_loss and config.has_kl_reward:
        return None
    if config.has_kl_loss:
        return KL_IN_LOSS.get(str(config[f"{ACTOR}.kl_loss_type"]))
    is_k1 = config["algorithm.kl_penalty"] in ("kl", "k1")
    return "k1_reward" if config.has_kl_reward and is_k1 else None


def _advantage(config: VerlConfig) -> str | None:
    """Return klinic's name of the advantage; None where rows leave the loss after the rewards."""
    if config.rejects_samples:
        return None
    estimator = config["algorithm.adv_estimator"]
    if estimator == "rloo":
        return "leave_one_out"
    if estimator != "grpo":
        return None
    divides = config["algorithm.norm_adv_by_std_in_grpo"]
    return "group_mean" if divides is False else "group_std"


def _learner_dtype(config: VerlConfig) -> str | None:
    """Return the dtype of the forward passes; FSDP takes it from `mixed_precision` alone."""
    strategy = str(config[f"{ACTOR}.strategy"])
    if strategy.startswith("fsdp"):
        named = config[f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"]
        return DTYPES.get(str(named or "bf16"))
    return DTYPES.get(str(config[f"{ACTOR}.{strategy}.dtype"]))


def _max_version_lag(config: VerlConfig) -> int | None:
    """Return the lag that the trainer's mode allows: 0 where it waits for every batch."""
    if config["trainer.v1.trainer_mode"] == "sync":
        return 0
    allowed: int | None = config["trainer.v1.sampler.max_off_policy_threshold"]
    return allowed


def _warmup_steps(config: VerlConfig, max_steps: int | None) -> int | None:
    steps = config[f"{ACTOR}.optim.lr_warmup_steps"]
    if steps is not None and steps >= 0:
        return int(steps)
    ratio = config[f"{ACTOR}.optim.lr_warmup_steps_ratio"]
    return None if ratio is None or max_steps is None else int(ratio * max_steps)
