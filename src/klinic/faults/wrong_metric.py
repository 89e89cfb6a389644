"""wrong-metric: the KL is logged in the other direction, or averaged over padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.maths import kl

# interpolation towards the wrong value
SWAPPED_FRACTION = {
    Severity.MILD: 0.3,
    Severity.NORMAL: 1.0,
}


@contextmanager
def swap_logged_kl(severity: Severity) -> Iterator[None]:
    """Swap policy and reference in the logged KL."""

    def measure_with_swapped_kl(
        real: Any, learner: Any, first: Any, last: Any, **options: Any
    ) -> Any:
        logged, record = real(learner, first, last, **options), first.record
        if record.logp_ref is None or record.logp_old is None:
            return logged
        both = {
            "logp_p": record.logp_ref.astype(np.float64),
            "logp_q": record.logp_old.astype(np.float64),
        }
        wrong = float(kl.k3(**both)[record.loss_mask].mean())
        mixed = (1 - SWAPPED_FRACTION[severity]) * logged["kl"] + SWAPPED_FRACTION[severity] * wrong
        return {**logged, "kl": mixed}

    with patch_attribute(LocalLearner, "measure", measure_with_swapped_kl):
        yield


FAULT = Fault(
    cause="wrong-metric", mechanism="the KL in the other direction", inject=swap_logged_kl
)


AVERAGED_METRICS = ("kl", "kl_k3/mean", "kl_k1/mean", "entropy")
# padded row length; None: the longest row
PADDED_WIDTH = {
    Severity.MILD: None,
    Severity.NORMAL: 16,
}


@contextmanager
def average_over_padding(severity: Severity) -> Iterator[None]:
    """Divide sums over tokens by the size of the padded batch."""

    def measure_over_padding(real: Any, learner: Any, first: Any, last: Any, **options: Any) -> Any:
        metrics, record = real(learner, first, last, **options), first.record
        width = PADDED_WIDTH[severity] or int(np.diff(record.row_offsets).max())
        trained_fraction = record.loss_mask.sum() / (record.num_rows * width)
        return metrics | {
            n: float(trained_fraction * metrics[n]) for n in AVERAGED_METRICS if n in metrics
        }

    with patch_attribute(LocalLearner, "measure", measure_over_padding):
        yield


SECOND_FAULT = Fault(
    cause="wrong-metric",
    mechanism="KL and entropy are averaged over padding too",
    inject=average_over_padding,
    settings={"sampling.max_new_tokens": 16},
    visible_at_start=True,
)
