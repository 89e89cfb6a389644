"""A batch of verl's TransferQueue as the arguments of `Recorder.record_step`.

A field is a jagged tensor or a list with one entry per row, without padding within the row; rows
that verl added to fill a batch are tagged and left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klinic.evidence.batch_arrays import to_array
from klinic.evidence.record import EmittedBy
from klinic.integrations.verl.settings import ACTOR, VerlConfig

FIELDS = (
    "uid",
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropy",
    "advantages",
    "rm_scores",
    "token_level_rewards",
    "num_turns",
)
"""The fields of a step that are read; those that a run does not have are absent."""

NUM_SINGLE_TURNS = 2  # a prompt and its answer
CERTAIN_LOGP = -0.01  # nats: above it a sampler's log-prob may round to 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlBatch:
    """The rows of a step, without those that only fill the batch."""

    rows: Mapping[str, Sequence[Any]]
    """By field, one array or value per row."""
    tags: Sequence[Mapping[str, Any]]
    keys: Sequence[str]
    """Of each row: prompt, sample and output, joined by underscores."""
    process: np.ndarray | None = None
    """Rank of the process that trained each row."""


def read_batch(
    fields: Mapping[str, Any],
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    num_processes: int = 1,
) -> VerlBatch:
    """Return the rows of the fields that `kv_batch_get` returned."""
    real = [row for row, tag in enumerate(tags) if not tag.get("is_padding", False)]
    rows = {name: list(fields[name]) for name in FIELDS if name in fields}
    process = None
    if num_processes > 1 and len(tags) % num_processes == 0:  # verl splits it in equal parts
        process = np.arange(len(tags)) // (len(tags) // num_processes)
    return VerlBatch(
        rows={name: [values[row] for row in real] for name, values in rows.items()},
        tags=[tags[row] for row in real],
        keys=[keys[row] for row in real],
        process=None if process is None else process[real],
    )


def step_arguments(
    batch: VerlBatch, metrics: Mapping[str, Any], config: VerlConfig, step: int
) -> dict[str, Any]:
    """Return the arguments of `Recorder.record_step`; what the run does not have is None."""
    mask = [row.astype(np.bool_) for row in _arrays(batch, "response_mask") or ()]
    emitted_by = find_emitters(batch, config)
    reward_field = "token_level_rewards" if config.has_kl_reward else "rm_scores"
    return {
        "step": step,
        "prompt_ids": _arrays(batch, "prompts"),
        "completion_ids": _arrays(batch, "responses"),
        "group": _groups(batch),
        "loss_mask": mask or None,
        "emitted_by": emitted_by,
        "logp_sampler": _sampler_logp(batch, emitted_by),
        "logp_old": None if config.copies_sampler else _arrays(batch, "old_log_probs"),
        "logp_ref": _arrays(batch, "ref_log_prob"),
        "entropy": _arrays(batch, "entropy"),
        "reward": _row_sums(_arrays(batch, reward_field)),
        "advantage": None if _has_many_outputs(batch) else _arrays(batch, "advantages"),
        "weight_version": _weight_versions(batch),
        "process": batch.process,
        "learner_version": step - 1,
        **_step_numbers(metrics, config),
    }


def find_emitters(batch: VerlBatch, config: VerlConfig) -> list[np.ndarray] | None:
    """Return who emitted each token, by the sampler's log-probs; None without them.

    verl's agent loops give tokens of tools and templates a log-prob of exactly 0. A sampled token
    has one only if it was certain: then the learner agrees, and the mask decides.
    """
    sampler = _arrays(batch, "rollout_log_probs")
    mask, old = _arrays(batch, "response_mask"), _arrays(batch, "old_log_probs")
    if sampler is None or mask is None or config.rejects_samples:
        return None
    turns = [int(num) for num in batch.rows.get("num_turns") or [NUM_SINGLE_TURNS] * len(mask)]
    emitters = []
    for row, (logp, trained) in enumerate(zip(sampler, mask, strict=True)):
        is_foreign = trained == 0
        if turns[row] > NUM_SINGLE_TURNS and old is not None and _reads_zeros(config):
            is_foreign = is_foreign | (old[row] < CERTAIN_LOGP)
        is_foreign = is_foreign & (logp == 0)
        emitters.append(np.where(is_foreign, EmittedBy.TOOL, EmittedBy.POLICY))
    return emitters


def _reads_zeros(config: VerlConfig) -> bool:
    return not config.truncates_sampling and not config.copies_sampler


def _arrays(batch: VerlBatch, name: str) -> list[np.ndarray] | None:
    values = batch.rows.get(name)
    return None if values is None else [to_array(row) for row in values]


def _sampler_logp(batch: VerlBatch, emitted_by: list[np.ndarray] | None) -> list[np.ndarray] | None:
    """Return the sampler's log-probs; NaN at tokens that it did not emit."""
    logp = _arrays(batch, "rollout_log_probs")
    if logp is None or emitted_by is None:
        return logp
    return [
        np.where(source == EmittedBy.POLICY, row, np.nan)
        for row, source in zip(logp, emitted_by, strict=True)
    ]


def _groups(batch: VerlBatch) -> list[int]:
    """Return the number of each row's prompt, by the `uid` that the advantages were grouped by."""
    uids = batch.rows.get("uid") or [key.rsplit("_", 2)[0] for key in batch.keys]
    numbers: dict[str, int] = {}
    return [numbers.setdefault(str(uid), len(numbers)) for uid in uids]


def _has_many_outputs(batch: VerlBatch) -> bool:
    """Whether a sample has several rows: their advantages are those of its last one."""
    return any(not key.endswith("_0") for key in batch.keys)


def _row_sums(rows: list[np.ndarray] | None) -> np.ndarray | None:
    return None if rows is None else np.array([row.astype(np.float64).sum() for row in rows])


def _weight_versions(batch: VerlBatch) -> list[int] | None:
    """Return the oldest weights that sampled each row; None if the engine reports none."""
    versions = [tag.get("min_global_steps") for tag in batch.tags]
    return None if None in versions else [int(v) for v in versions if v is not None]


def _step_numbers(metrics: Mapping[str, Any], config: VerlConfig) -> dict[str, float | None]:
    """Return the numbers of the step that verl logs."""
    in_reward = not config.has_kl_loss and config.has_kl_reward
    accuracies = [
        float(value)
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/mean@" in name
    ]
    adaptive_coef = _number(metrics, "actor/reward_kl_penalty_coeff") if in_reward else None
    return {
        "kl_coef": config.kl_coef if adaptive_coef is None else adaptive_coef,
        "kl_logged": _number(metrics, "actor/reward_kl_penalty" if in_reward else "actor/kl_loss"),
        "entropy_coef": float(config[f"{ACTOR}.entropy_coeff"] or 0.0),
        "learning_rate": _number(metrics, "actor/lr"),
        "grad_norm": _number(metrics, "actor/grad_norm"),
        "loss": _loss(metrics, config),
        "eval_accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
    }


def _loss(metrics: Mapping[str, Any], config: VerlConfig) -> float | None:
    """Return the whole loss of a step with one update; verl logs averages over several."""
    policy = _number(metrics, "actor/pg_loss")
    if policy is None or config.num_updates != 1:
        return None
    kl, entropy = _number(metrics, "actor/kl_loss"), _number(metrics, "actor/entropy_loss")
    penalty = config.kl_coef * kl if config.has_kl_loss and kl is not None else 0.0
    return policy + penalty - float(config[f"{ACTOR}.entropy_coeff"] or 0.0) * (entropy or 0.0)


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None else float(value)
