"""The evidence of a run without texts, names and paths: what may be passed on is listed here.

Everything that is not listed is left out: files, keys, facts, metrics and columns. A listed value
is a number, one of a fixed set of words, or is replaced by a number of its own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from klinic.evidence.facts import NON_FINITE
from klinic.evidence.fields import FACTS, METRICS, NOTHING_ARRIVED, PROBES, RUN_KEYS
from klinic.evidence.record import StepRecord
from klinic.evidence.renumbering import TokenRenumbering
from klinic.evidence.run_facts import SHARED_FORWARD
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.surrogate import SURROGATES

Rule = Callable[[Any], Any]
"""Returns what may be passed on of a value; None for nothing."""

VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}((a|b|rc|\.dev|\.post)\d{1,5})?")
OTHER = "other"  # a word that is not in the list, such as the name of a user's own estimator
LIBRARIES = (
    *("python", "klinic", "torch", "transformers", "peft", "numpy", "pyarrow", "safetensors"),
    *("vllm", "trl"),
)
TRAINERS = (
    *("klinic", "trl", "verl", "openrlhf", "prime-rl", "tinker", "nemo-rl", "slime", "skyrl"),
    *("open-instruct", "miles", "ms-swift", "unsloth", "areal"),
)
FINGERPRINTS = (
    *("weights_published", "weights_loaded", "reference_digest", "reference_fingerprint"),
)
OTHER_METRICS = (
    *("loss", "policy_loss", "kl_loss", "kl_penalty", "kl_coef", "kl_target", "learning_rate"),
    *("kl_k1/mean", "kl_k3/mean", "kl_exact/mean", "kl_update", "kl_to_start", "logp_ref"),
    *("grad_norm_clipped", "update_norm", "unchanged_share", "reward_std", "reward/missing"),
    *("frac_reward_zero_std", "advantage/max", "completions/mean_length", "num_tokens"),
    *("completions/clipped_ratio", "sampling/effective_sample_size", "sampling/staleness"),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
)
"""Metrics for the curves of a report; `fields.METRICS` are those that checks read."""
PROBE_VALUES = (
    *("largest", "mean", "ratio", "cosine", "norm", "expected_norm", "score_norm"),
    *("off_to_reference", "off_to_policy", "policy_to_reference"),
    *("repeated", "fresh", "raw", "adapter_off", "cached_tokens"),
    *("same", "right_answers", "wrong_completions"),
)


def number(value: Any) -> Any:
    """Pass on a number, also as `facts.fact_to_json` writes a non-finite one."""
    if isinstance(value, bool | int | float):
        return value
    return value if isinstance(value, str) and value in NON_FINITE else None


def word(*words: str) -> Rule:
    """Return a rule that passes on these words, and `OTHER` for any other text."""

    def rule(value: Any) -> Any:
        return None if not isinstance(value, str) else value if value in words else OTHER

    return rule


def version(value: Any) -> Any:
    """Pass on a version without its local part, which may name a machine or a company."""
    match = VERSION.match(value) if isinstance(value, str) else None
    return None if match is None else match[0]


def section(**rules: Rule) -> Rule:
    """Return a rule for an object with these keys."""

    def rule(value: Any) -> Any:
        return apply_rules(rules, value) if isinstance(value, Mapping) else None

    return rule


def apply_rules(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the rules pass on; null stays null."""
    passed = {name: rule(values[name]) for name, rule in rules.items() if name in values}
    return {
        name: value for name, value in passed.items() if value is not None or values[name] is None
    }


DTYPE = word("fp32", "bf16", "fp16")
RUN_RULES: Mapping[str, Rule] = {
    "klinic": version,
    "trainer": word(*TRAINERS),
    "threads": number,
    "versions": section(**dict.fromkeys(LIBRARIES, version)),
    "sampling": section(
        **dict.fromkeys(
            ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"),
            number,
        )
    ),
    "logprob_mode": word("processed", "raw"),
    "token_ids": word("characters"),
    "vocabulary_size": number,
    "policy": section(dtype=DTYPE, dropout=number, num_experts=number, untrained=number),
    "reference": section(
        kind=word("copy", "adapter_off", "adapter_frozen", "none"),
        wanted=word("start", "path"),
        sync_every=number,
        ema=number,
    ),
    "teacher": section(
        kind=word("copy", "adapter_off", "adapter_frozen", "none"),
        estimator=word(*ESTIMATORS),
        coef=number,
        alone=number,
    ),
    "sampler": section(
        kind=word("transformers", "vllm"),
        dtype=DTYPE,
        max_version_lag=number,
        shares_weights=number,
    ),
    "shards": number,
    "processes": number,
    "estimator": word(*ESTIMATORS, "k3_sequence_ratio"),
    "kl_target": number,
    "loss": section(
        name=word(*SURROGATES),
        clip_low=number,
        clip_high=number,
        aggregation=word("token_mean", "sequence_mean", "constant"),
        overridden=number,
        importance_cap=number,
    ),
    "advantage": word("none", "group_mean", "leave_one_out", "group_std", "batch"),
    "group_size": number,
    "updates_per_generation": number,
    "max_steps": number,
    "warmup_steps": number,
    "logp_old": word(SHARED_FORWARD, "scored"),
}
"""Keys of run.json; those with token ids are renumbered."""
ID_LISTS = ("eos_ids", "declared_eos_ids", "end_like_ids")
LOOKS_LIKE = word(*ESTIMATORS)
DAMAGE = "some tensors did not arrive as they were sent"


class Redaction:
    """Redacts the parts of one run; equal ids and fingerprints stay equal."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._fingerprints: dict[str, str] = {}
        size = facts.get("vocabulary_size")
        self._ids = TokenRenumbering(
            [*(i for name in ID_LISTS for i in _id_list(facts.get(name))), *_pad_ids(facts)],
            size if isinstance(size, int) and size > 0 else None,
        )

    def run_facts(self) -> dict[str, Any]:
        """Return run.json without its schema, which a writer adds."""
        lists = {
            name: [self._ids.special_id(token_id) for token_id in _id_list(self._facts[name])]
            for name in ID_LISTS
            if isinstance(self._facts.get(name), list)
        }
        passed = {**apply_rules(RUN_RULES, self._facts), **lists}
        for token_id in _pad_ids(self._facts):
            passed["pad_id"] = self._ids.special_id(token_id)
        return passed

    def record(self, record: StepRecord) -> StepRecord:
        """Return the record of a step with renumbered ids and without names."""
        parts = record.reward_parts.values()
        return replace(
            self._ids.renumber(record),
            prompt_index=None,
            group=_small_indices(record.group, record.num_rows),
            sample=None
            if record.sample is None
            else _small_indices(record.sample, record.num_rows),
            finish_reason=_known_reasons(record.finish_reason),
            reward_parts={f"part-{place}": part for place, part in enumerate(parts, 1)},
            facts={
                name: value
                for name in FACTS
                if (value := self._fact(name, record.facts.get(name))) is not None
            },
        )

    def _fact(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and name in FINGERPRINTS:
            # findings quote the first eight characters
            return self._fingerprints.setdefault(value, f"{len(self._fingerprints) + 1:08d}")
        return word("emitted_by")(value) if name == "loss_mask_from" else number(value)


def redact_metrics(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with its listed metrics."""
    names = ("step", *METRICS, *OTHER_METRICS)
    return apply_rules(dict.fromkeys(names, number), entry)


def _damage(value: Any) -> Any:
    """Pass on that tensors arrived damaged, without their names."""
    if not isinstance(value, str) or not value:
        return None
    return value if value == NOTHING_ARRIVED else DAMAGE


def redact_probe(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a line of probes.jsonl with its listed values; None for an unknown probe."""
    name = entry.get("probe")
    if not isinstance(name, str) or name not in PROBES:
        return None
    numbers = dict.fromkeys(("step", *PROBE_VALUES), number)
    rules = {**numbers, "looks_like": LOOKS_LIKE, "damage": _damage}
    return {"probe": name, **apply_rules(rules, entry)}


def column_names(record: StepRecord) -> list[str]:
    """Return the recorded columns of a redacted record."""
    structure = ("step", "facts", "reward_parts")
    names = [f.name for f in fields(record) if f.name not in structure]
    return [name for name in names if getattr(record, name) is not None]


def left_out_keys(facts: Mapping[str, Any]) -> list[str]:
    """Return the keys of a run.json that are left out."""
    return sorted(set(RUN_KEYS) & set(facts) - {*RUN_RULES, *ID_LISTS, "pad_id", "schema"})


def _id_list(value: Any) -> list[int]:
    return [i for i in value if isinstance(i, int)] if isinstance(value, list) else []


def _pad_ids(facts: Mapping[str, Any]) -> list[int]:
    return [facts["pad_id"]] if isinstance(facts.get("pad_id"), int) else []


def _small_indices(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Return indices as they are, or by rank if they are too large to be those of a step."""
    if not values.size or (values.min() >= 0 and values.max() < num_rows):
        return values
    ranks: np.ndarray = np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return ranks


def _known_reasons(reasons: np.ndarray | None) -> np.ndarray | None:
    if reasons is None:
        return None
    return np.where(np.isin(reasons, ("stop", "length")), reasons, "").astype(np.str_)
