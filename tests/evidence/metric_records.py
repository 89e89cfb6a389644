"""Records with random log-probs, and the comparison of metrics whose sums have another order."""

import numpy as np
import pytest

from klinic.evidence.record import StepRecord

ORDER_STATISTICS = ("/min", "/max", "/p99", "/share_above", "_mean", "num_tokens")
TOLERANCE = 1e-12  # relative to the sum of the absolute values, where a sum has another order


def random_record(seed, lengths, *, masked=0.0, holes=0.0, same_logp=False):
    stream = np.random.default_rng(seed)
    num, rows = int(np.sum(lengths)), len(lengths)
    logp_old = -stream.exponential(1.0, num).astype(np.float32)
    noise = stream.normal(0, [[0.01], [0.3], [0.3], [0.2]], (4, num)).astype(np.float32)
    columns = dict(zip(("logp_sampler", "logp_ref", "logp_teacher", "logp"), noise, strict=True))
    columns = {name: logp_old + values for name, values in columns.items()}
    for name in ("logp_sampler", "logp_ref"):
        columns[name][stream.random(num) < holes] = np.nan
    kl_exact = np.abs(noise[1])
    kl_exact[stream.random(num) < 0.8] = np.nan
    if same_logp:
        columns["logp"] = logp_old
    return StepRecord(
        step=1,
        row_offsets=np.cumsum([0, *lengths]),
        group=np.arange(rows) // 2,
        token_ids=stream.integers(0, 9, num),
        loss_mask=stream.random(num) >= masked,
        logp_old=logp_old,
        kl_exact=kl_exact,
        entropy=np.abs(logp_old),
        reward=stream.random(rows),
        advantage=stream.normal(size=rows),
        **columns,
    )


def assert_metrics_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith(ORDER_STATISTICS):
            np.testing.assert_equal(found[name], value, name)
        else:
            assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
