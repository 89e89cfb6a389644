"""temperature-on-one-side: the sampler applies a temperature and reports log-probs without it.

Second mechanism: policy and sampler apply the temperature, the reference does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.sampler import decoding
from klinic.training import build

# interpolation towards the unscaled logits
UNSCALED_FRACTION = {
    Severity.MILD: 0.3,
    Severity.NORMAL: 1.0,
}


@contextmanager
def report_unscaled_logps(severity: Severity) -> Iterator[None]:
    """Report the log-probs of the unscaled logits."""

    def draw_unscaled(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        samples = real(logits, uniform, params)
        if params.temperature == 0:  # greedy evaluation
            return samples
        inverse = 1 / params.temperature + UNSCALED_FRACTION[severity] * (
            1 - 1 / params.temperature
        )
        logp = torch.log_softmax(logits * inverse, -1)
        return replace(samples, logp=logp.gather(-1, samples.token_ids[:, None])[:, 0])

    with patch_attribute(decoding, "sample_tokens", draw_unscaled):
        yield


FAULT = Fault(
    cause="temperature-on-one-side",
    mechanism="the sampler reports log-probs of the unscaled logits",
    inject=report_unscaled_logps,
    settings={"sampling.temperature": 0.7},
    visible_at_start=True,
)


REFERENCE_TEMPERATURE = {Severity.MILD: 0.65, Severity.NORMAL: 1.0}  # its temperature


@contextmanager
def unscale_reference(severity: Severity) -> Iterator[None]:
    """Undo the temperature in the reference's scorer."""

    def unscaled_reference(real: Any, policy: Any, **options: Any) -> Any:
        reference = real(policy, **options)
        reference.scorer.head.logit_scale *= policy.temperature / REFERENCE_TEMPERATURE[severity]
        return reference

    with patch_attribute(build, "reference_at_start", unscaled_reference):
        yield


SECOND_FAULT = Fault(
    cause="temperature-on-one-side",
    mechanism="the reference's logits are not divided by the temperature",
    inject=unscale_reference,
    settings={"sampling.temperature": 0.6},
    visible_at_start=True,
)
