"""Columns of the wrong kind or with values that no run writes, as the part of a step."""

import numpy as np
import pyarrow as pa
from parquet_bombs import write_part


def columns(**changes):
    two = {
        "group": pa.array([0, 0]),
        "token_ids": pa.array([[1, 2], [3]]),
        "loss_mask": pa.array([[True, True], [True]]),
        "logp": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_old": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_sampler": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_ref": pa.array([[-1.0, -2.0], [-0.5]]),
        "reward": pa.array([1.0, 2.0]),
    }
    return pa.table({name: c for name, c in {**two, **changes}.items() if c is not None})


def floats(first, second, third):
    return pa.array([[first, second], [third]], pa.list_(pa.float64()))


INF, NAN = float("inf"), float("nan")
COLUMNS = {
    "log-probs of 1e308": {
        "logp_old": floats(1e308, -1e308, 1e300),
        "logp_ref": floats(-1e308, 1e308, -1e300),
        "logp_sampler": floats(-1e308, 1e308, 0.0),
        "logp": floats(-1e308, 1e308, 0.0),
    },
    "log-probs of infinity": {"logp_old": floats(INF, -INF, NAN), "logp_ref": floats(INF, 0, -INF)},
    "log-probs that are no numbers": {"logp_old": floats(NAN, NAN, NAN)},
    "positive log-probs": {"logp_old": floats(5.0, 1e9, 88.0)},
    "rewards of 1e308": {"reward": pa.array([1e308, -1e308]), "advantage": pa.array([INF, -INF])},
    "text for numbers": {"logp_old": pa.array([["x", "y"], ["z"]])},
    "lists of lists": {"logp_old": pa.array([[[1.0], [1.0]], [[1.0]]])},
    "negative ids": {"token_ids": pa.array([[-1, -(2**62)], [2**62]])},
    "huge groups": {"group": pa.array([2**63 - 1, -(2**63)])},
    "decimal groups": {"group": pa.array([1, 2]).cast(pa.decimal128(20, 0))},
    "times for groups": {"group": pa.array([1, 2]).cast(pa.timestamp("s"))},
    "no rows": {
        "group": pa.array([], pa.int64()),
        **{n: pa.array([], pa.list_(pa.int64())) for n in ("token_ids", "loss_mask")},
        **dict.fromkeys(("logp", "logp_old", "logp_sampler", "logp_ref", "reward")),
    },
    "empty lists": {
        "token_ids": pa.array([[], []], pa.list_(pa.int64())),
        "loss_mask": pa.array([[], []], pa.list_(pa.bool_())),
        **dict.fromkeys(("logp", "logp_old", "logp_sampler", "logp_ref")),
    },
    "nothing trained on": {"loss_mask": pa.array([[False, False], [False]])},
    "no mask": {"loss_mask": None},
    "no groups": {"group": None},
    "lists of another length": {"logp_ref": pa.array([[1.0], [1.0, 2.0]])},
    "no lists": {"token_ids": pa.array([1, 2])},
    "only nulls": {"reward": pa.nulls(2), "advantage": pa.array([None, None], pa.float64())},
    "a null list": {"token_ids": pa.array([[1, 2], None])},
    "versions": {
        "weight_version": pa.array([[2**62, -(2**62)], [0]]),
        "rank": pa.array([[-1, 2**62], [0]]),
        "emitted_by": pa.array([[100, -100], [5]]),
    },
    "overflow": {"emitted_by": pa.array([[1000, -1000], [5]])},
    "half floats": {"logp_old": pa.array([np.float16([-1, -2]), np.float16([-1])])},
    "names of rewards": {
        "reward/\x1b[2J\x07<script>alert(1)</script>": pa.array([1.0, 2.0]),
        "reward/": pa.array([1.0, 2.0]),
        "reward/a.b": pa.array([1.0, 2.0]),
    },
    "bytes for text": {
        "finish_reason": pa.array([b"\xff\xfe", b"\x80"]).view(pa.binary()),
    },
    "control characters": {"finish_reason": pa.array(["\x1b[2J", "\x00" * 2000])},
}


def spoil_columns(run, name):
    write_part(run, columns(**COLUMNS[name]))


def text_that_is_no_text(run):
    reason = pa.array([b"\xff\xfe\xfd", b"\x80"])
    text = pa.StringArray.from_buffers(2, reason.buffers()[1], reason.buffers()[2])
    write_part(run, columns(finish_reason=text))
