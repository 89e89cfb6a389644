"""One example and one edge case for every public formula, for the tests that hold for all."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from klinic.maths import (
    advantage,
    entropy,
    importance,
    kl,
    kl_estimators,
    kl_terms,
    masked,
    ratio,
    score,
    surrogate,
)
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.surrogate import PolicyInputs

MODULES = (
    *(advantage, entropy, importance, kl, kl_estimators, kl_terms, masked, ratio, score),
    surrogate,
)

MASK = np.array([True, True, False, True, True])
OFFSETS = np.array([0, 3, 5])
GROUP = np.array([0, 0])
LOGP = np.log(np.array([0.5, 0.2, 0.9, 0.4, 0.3]))
LOGP_OLD = np.log(np.array([0.4, 0.3, 0.9, 0.4, 0.1]))
LOGP_REF = np.log(np.array([0.3, 0.3, 0.9, 0.7, 0.3]))
ROWS_P = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]))
ROWS_Q = np.log(np.array([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1]]))
REWARD = np.array([1.0, 0.0, 0.5, 0.0])
GROUPS = np.array([0, 0, 1, 1])
PAIR = {"logp_p": LOGP, "logp_q": LOGP_REF}
SAME = {"logp_p": LOGP, "logp_q": LOGP}
WEIGHTS = {"loss_mask": MASK, "dtype": np.float64}
NOTHING = {"loss_mask": np.zeros(5, dtype=bool), "dtype": np.float64}
ROW_RATIO = {"logp": LOGP, "logp_old": LOGP_OLD, "loss_mask": MASK, "row_offsets": OFFSETS}
SAMPLED = {
    "sampling": ImportanceSampling(mode="sequence_mask", cap=1.5),
    "logp": LOGP,
    "logp_sampler": LOGP_OLD,
    "loss_mask": MASK,
    "row_offsets": OFFSETS,
}
FAR = {"logp": np.array([2e3, -1e3, 0.0, 0.0, 0.0]), "logp_sampler": np.zeros(5)}
EQUAL = {"reward": np.full(4, 0.1), "group": GROUPS}


@dataclass(frozen=True, kw_only=True)
class Example:
    """Arguments of a formula, and those of an edge case with the value it must have there."""

    args: dict[str, Any]
    edge: dict[str, Any]
    edge_value: Any


def kl_inputs(**changes: Any) -> dict[str, Any]:
    fields = {
        "group": GROUP,
        "row_offsets": OFFSETS,
        "logp": LOGP,
        "logp_old": LOGP_OLD,
        "logp_sampler": LOGP_OLD,
        "logp_ref": LOGP_REF,
        "loss_mask": MASK,
        "kl_exact": np.array([0.1, 0.2, 0.3, 0.4, 0.5]),
        "kl_topk": np.array([0.1, 0.1, 0.1, 0.1, 0.1]),
    }
    return {"inputs": (KLInputs, fields | changes)}


def policy_inputs(**changes: Any) -> dict[str, Any]:
    fields = {
        "advantage": np.array([1.0, -1.0]),
        "row_offsets": OFFSETS,
        "logp": LOGP,
        "logp_old": LOGP_OLD,
        "loss_mask": MASK,
    }
    return {"inputs": (PolicyInputs, fields | changes)}


AT_REFERENCE = kl_inputs(logp_ref=LOGP, logp_old=LOGP, kl_exact=np.zeros(5), kl_topk=np.zeros(5))
NO_ADVANTAGE = policy_inputs(advantage=np.zeros(2))
ZEROS = np.zeros(5)

EXAMPLES: dict[str, Example] = {
    **{
        name: Example(args=PAIR, edge=SAME, edge_value=ZEROS)
        for name in ("kl.k1", "kl.k2", "kl.k3", "kl.absolute")
    },
    "entropy.entropy": Example(
        args={"logp": ROWS_P},
        edge={"logp": np.array([[0.0, -math.inf], [-math.inf, 0.0]])},
        edge_value=[0.0, 0.0],
    ),
    "kl.exact": Example(
        args={"logp_p": ROWS_P, "logp_q": ROWS_Q},
        edge={
            "logp_p": np.array([[0.0, -math.inf], [0.0, -math.inf]]),
            "logp_q": np.array([[-math.log(2.0), -math.log(2.0)], [0.0, -math.inf]]),
        },
        edge_value=np.array([math.log(2.0), 0.0]),
    ),
    "kl.coarse_logp": Example(
        args={"logp": ROWS_P, "token_ids": np.array([[0], [2]])},
        edge={"logp": np.array([[0.0, -math.inf]]), "token_ids": np.array([[0]])},
        edge_value=np.array([[0.0, -math.inf]]),
    ),
    "kl.topk": Example(
        args={"logp_p": ROWS_P, "logp_q": ROWS_Q, "k": 2},
        edge={"logp_p": ROWS_P, "logp_q": ROWS_P, "k": 1},
        edge_value=np.zeros(2),
    ),
    "kl.bucketed_kl": Example(
        args={
            "logp_p": ROWS_P,
            "token_ids": np.array([[0], [2]]),
            "coarse_q": np.log([[0.25, 0.75], [0.5, 0.5]]),
        },
        edge={
            "logp_p": np.array([[0.0, -math.inf]]),
            "token_ids": np.array([[0]]),
            "coarse_q": np.array([[-math.log(2.0), -math.log(2.0)]]),
        },
        edge_value=np.array([math.log(2.0)]),
    ),
    **{
        f"kl_terms.{name}": Example(args=kl_inputs(), edge=AT_REFERENCE, edge_value=ZEROS)
        for name in (
            *("unbiased", "exact", "topk", "sequence", "k1", "k2", "k3", "k3_plus", "k3_ratio"),
            *("k3_reversed", "absolute", "k1_reward", "k1_reward_immediate", "exp_k1_reward"),
        )
    },
    "kl_terms.leave_one_out_baseline": Example(
        args={"values": LOGP, "group": GROUP, "row_offsets": OFFSETS},
        edge={"values": LOGP, "group": np.array([0, 1]), "row_offsets": OFFSETS},
        edge_value=ZEROS,
    ),
    "kl_estimators.kl_term": Example(
        args={"name": "unbiased", "aggregation": "token_mean"} | kl_inputs(),
        edge={"name": "k3", "aggregation": "token_mean"}
        | kl_inputs(logp=np.where(MASK, LOGP, np.nan), logp_ref=np.where(MASK, LOGP, np.inf)),
        edge_value=ZEROS,
    ),
    "ratio.token_ratio": Example(
        args={"logp": LOGP, "logp_old": LOGP_OLD},
        edge={"logp": LOGP, "logp_old": LOGP},
        edge_value=np.ones(5),
    ),
    "ratio.sequence_ratio": Example(
        args=ROW_RATIO,
        edge=ROW_RATIO | {"logp": np.full(5, np.nan), "loss_mask": np.zeros(5, dtype=bool)},
        edge_value=np.ones(5),
    ),
    "ratio.sequence_log_ratio": Example(
        args=ROW_RATIO,
        edge=ROW_RATIO | {"logp": np.full(5, np.nan), "loss_mask": np.zeros(5, dtype=bool)},
        edge_value=ZEROS,
    ),
    "ratio.clip": Example(
        args={"ratio": np.array([0.5, 1.0, 2.0]), "clip_low": 0.2, "clip_high": 0.3},
        edge={"ratio": np.array([0.0, np.inf]), "clip_low": 0.2, "clip_high": 0.3},
        edge_value=np.array([0.8, 1.3]),
    ),
    "ratio.row_log_ratio": Example(
        args=ROW_RATIO,
        edge=ROW_RATIO | {"logp": np.full(5, np.nan), "loss_mask": np.zeros(5, dtype=bool)},
        edge_value=ZEROS,
    ),
    "importance.importance_weight": Example(
        args=SAMPLED,
        edge=SAMPLED | FAR | {"sampling": ImportanceSampling(cap=2.0)},
        edge_value=np.array([2.0, 0.0, 1.0, 1.0, 1.0]),
    ),
    "importance.above_cap": Example(
        args=SAMPLED,
        edge=SAMPLED | FAR,
        edge_value=np.array([True, True, False, False, False]),
    ),
    "ratio.effective_sample_size": Example(
        args={"log_weight": LOGP},
        edge={"log_weight": np.array([800.0, -800.0])},
        edge_value=np.array(0.5),
    ),
    **{
        f"advantage.{name}": Example(
            args={"reward": REWARD, "group": GROUPS}, edge=EQUAL, edge_value=np.zeros(4)
        )
        for name in ("group_mean", "leave_one_out", "group_std", "batch")
    },
    "advantage.none": Example(
        args={"reward": REWARD, "group": GROUPS},
        edge={"reward": np.zeros(0), "group": np.zeros(0, dtype=np.int64)},
        edge_value=np.zeros(0),
    ),
    **{
        f"surrogate.{name}": Example(args=policy_inputs(), edge=NO_ADVANTAGE, edge_value=ZEROS)
        for name in ("clipped_surrogate", "clipped_sequence_surrogate", "clipped_weight_surrogate")
    },
    "masked.apply_mask": Example(
        args={"values": LOGP, "loss_mask": MASK},
        edge={"values": np.full(5, np.nan), "loss_mask": np.zeros(5, dtype=bool)},
        edge_value=ZEROS,
    ),
    "masked.weighted_sum": Example(
        args={"values": LOGP, "weights": np.full(5, 0.2)},
        edge={"values": np.full(5, np.nan), "weights": ZEROS},
        edge_value=np.array(0.0),
    ),
    "masked.token_mean": Example(args=WEIGHTS, edge=NOTHING, edge_value=ZEROS),
    "masked.sequence_mean": Example(
        args=WEIGHTS | {"row_offsets": OFFSETS},
        edge=NOTHING | {"row_offsets": OFFSETS},
        edge_value=ZEROS,
    ),
    "masked.constant": Example(
        args=WEIGHTS | {"row_offsets": OFFSETS, "length": 4},
        edge=NOTHING | {"row_offsets": OFFSETS, "length": 4},
        edge_value=ZEROS,
    ),
    "masked.aggregation_weights": Example(
        args=WEIGHTS | {"aggregation": "constant", "row_offsets": OFFSETS, "length": 4},
        edge=NOTHING | {"aggregation": "token_mean", "row_offsets": OFFSETS, "length": 4},
        edge_value=ZEROS,
    ),
    "masked.exclude_rows": Example(
        args={"loss_mask": MASK, "dropped": np.array([False, True]), "row_offsets": OFFSETS},
        edge={"loss_mask": MASK, "dropped": np.array([True, True]), "row_offsets": OFFSETS},
        edge_value=np.zeros(5, dtype=bool),
    ),
    "score.score_term": Example(
        args={"coef": LOGP_REF, "logp": LOGP, "value": LOGP_OLD},
        edge={"coef": np.full(5, 1e30), "logp": LOGP},
        edge_value=ZEROS,
    ),
}


def short_name(module: ModuleType, function: Callable[..., Any]) -> str:
    return f"{module.__name__.rpartition('.')[2]}.{function.__name__}"


FORMULAS: dict[str, Callable[..., Any]] = {
    short_name(module, function): function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not name.startswith("_")
}


def to_torch(value: Any) -> Any:
    import torch

    return torch.as_tensor(np.asarray(value))


def arguments(args: dict[str, Any], to_array: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the arguments in the array library of `to_array`; records are built from arrays."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            record, fields = value
            return record(**{name: convert(field) for name, field in fields.items()})
        if value is np.float64:
            return to_array(np.zeros(1)).dtype
        return to_array(value) if isinstance(value, np.ndarray) else value

    return {name: convert(value) for name, value in args.items()}
