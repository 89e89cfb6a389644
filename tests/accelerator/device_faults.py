"""Prints the comparison with the CPU for a learner on the stand-in, without and with each fault."""

import json
import sys
from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn import functional

from klinic.learner.local import LocalLearner
from klinic.model.head import Head
from klinic.model.scorer import TokenScorer
from klinic.replay.device_check import compare_with_cpu
from tiny_policies import batch_of, drifted_reference, learner_of, rollouts, small_policy


def on_device(tensor):
    return tensor.device.type != "cpu"


def learner_on_device():
    policy = small_policy()
    assert on_device(next(policy.lm.parameters()))
    return learner_of(policy, drifted_reference(policy))


@contextmanager
def logits_off_by_a_percent():
    plain = Head.forward

    def scaled(self, hidden, gradient=None):
        logits = plain(self, hidden, gradient)
        return logits * 1.01 if on_device(logits) else logits

    with mock.patch.object(Head, "forward", scaled):
        yield


@contextmanager
def attention_that_sees_the_future():
    plain = functional.scaled_dot_product_attention

    def unmasked(query, key, value, *rest, is_causal=False, **options):
        return plain(query, key, value, *rest, is_causal=is_causal and not on_device(query))

    with mock.patch.object(functional, "scaled_dot_product_attention", unmasked):
        yield


@contextmanager
def matrix_products_in_lower_precision():
    def rough(self, **inputs):
        enabled = self.device.type != "cpu"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return self.lm.get_decoder()(**inputs)

    with mock.patch.object(TokenScorer, "decode", rough):
        yield


@contextmanager
def a_gradient_that_is_lost():
    plain = LocalLearner.current_gradients

    def without_the_last(self):
        found = plain(self)
        return [*found[:-3], *(g * 0 if on_device(g) else g for g in found[-3:])]

    with mock.patch.object(LocalLearner, "current_gradients", without_the_last):
        yield


@contextmanager
def positions_that_start_at_one():
    plain = TokenScorer.hidden

    def shifted(self, layout):
        if on_device(layout.position_ids):
            object.__setattr__(layout, "position_ids", layout.position_ids + 1)
        return plain(self, layout)

    with mock.patch.object(TokenScorer, "hidden", shifted):
        yield


FAULTS = (
    logits_off_by_a_percent,
    attention_that_sees_the_future,
    matrix_products_in_lower_precision,
    a_gradient_that_is_lost,
    positions_that_start_at_one,
)


def compare(learner):
    return compare_with_cpu(learner, batch_of(rollouts()), kl_coef=0.5, dtype="fp32")


if __name__ == "__main__":
    torch.set_num_threads(1)
    healthy = compare(learner_on_device())
    found = {"healthy": (healthy.ok, healthy.describe())}
    for fault in FAULTS:
        learner = learner_on_device()  # before: loading a model checks its logits as well
        with fault():
            compared = compare(learner)
        found[fault.__name__] = (compared.ok, compared.describe())
    sys.stdout.write(json.dumps(found))
