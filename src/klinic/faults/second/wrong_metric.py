"""wrong-metric: KL and entropy are logged as means over padded rows, padding counted as 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import step_metrics

NAMES = ("kl", "kl_k3/mean", "kl_k1/mean", "entropy")
WIDTH = {Severity.MILD: None, Severity.NORMAL: 16}  # padded row length; None: the longest row


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Divide sums over tokens by the size of the padded batch."""

    def padded(real: Any, record: Any) -> Any:
        metrics = real(record)
        width = WIDTH[severity] or int(np.diff(record.row_offsets).max())
        share = record.loss_mask.sum() / (record.num_rows * width)
        return metrics | {n: float(share * metrics[n]) for n in NAMES if n in metrics}

    with patched(step_metrics, "step_metrics", padded):
        yield


FAULT = Fault(
    cause="wrong-metric",
    mechanism="KL and entropy are averaged over padding too",
    inject=inject,
    settings={"sampling.max_new_tokens": 16},
    visible_at_start=True,
)
