"""wrong-metric: KL and entropy are reported as means over padded rows, the padding counted as 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import step_metrics

NAMES = ("kl", "kl_k3/mean", "kl_k1/mean", "entropy")
WIDTH = {Severity.MILD: None, Severity.NORMAL: 16}  # of a padded row; None is that of the longest


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Divide sums over tokens by the size of the rectangle that they are padded to."""

    def padded(real: Any, record: Any) -> Any:
        metrics = real(record)
        width = WIDTH[severity] or int(np.diff(record.row_offsets).max())
        share = record.loss_mask.sum() / (record.num_rows * width)
        return metrics | {n: float(share * metrics[n]) for n in NAMES if n in metrics}

    with patched(step_metrics, "step_metrics", padded):
        yield


FAULT = Fault(
    cause="wrong-metric",
    mechanism="KL and entropy are means over padding too",
    inject=inject,
    settings={"sampling.max_new_tokens": 16},
    visible_at_start=True,
)
