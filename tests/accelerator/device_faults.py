"""Prints the tests of a learner on the stand-in, without and with each fault.

Without arguments: the comparison with the CPU, and updates with host waits and a resume. With a
recipe: the whole of `klinic check --device`, each fault from the first step on.
"""

import json
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional

from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.model.head import Head
from klinic.model.scorer import TokenScorer
from klinic.recipe.loading import load_recipe
from klinic.replay.check_report import CheckReport
from klinic.replay.device_check import compare_with_cpu
from klinic.replay.self_test import try_updates
from klinic.replay.single_batch import check_single_batch, start_new_run
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
        causal = is_causal and not on_device(query)
        return plain(query, key, value, *rest, is_causal=causal, **options)

    with mock.patch.object(functional, "scaled_dot_product_attention", unmasked):
        yield


@contextmanager
def matrix_products_in_lower_precision():
    def rough(self, **inputs):
        enabled = self.device.type != "cpu"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return self.lm.get_decoder()(**inputs)

    with mock.patch.object(TokenScorer, "_run_decoder", rough):
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


@contextmanager
def a_resume_without_moments():
    plain = LocalLearner.load

    def forgetful(self, folder, state):
        plain(self, folder, state)
        self._optimizer.state.clear()

    with mock.patch.object(LocalLearner, "load", forgetful):
        yield


@contextmanager
def a_read_in_every_chunk():
    plain = Head.forward

    def reading(self, hidden, gradient=None):
        hidden.sum().item()
        return plain(self, hidden, gradient)

    with mock.patch.object(Head, "forward", reading):
        yield


def compare(learner):
    compared = compare_with_cpu(learner, batch_of(rollouts()), kl_coef=0.5, dtype="fp32")
    return compared.ok, compared.describe()


def update(learner):
    learner.prepare(
        learner.score(batch_of(rollouts()), needs_reference=True), LossScales(kl_coef=0.5)
    )
    learner.commit()  # as in a check: there are moments to save
    with tempfile.TemporaryDirectory() as folder:
        results = try_updates(
            learner, batch_of(rollouts()), kl_coef=0.5, folder=Path(folder) / "saved"
        )
    return {result.name: (result.ok, result.detail) for result in results}


def check_whole(recipe, fault):
    """Run the whole check; the fault starts once the model is loaded, whose logits are checked."""
    result = CheckReport()
    with ExitStack() as faults:

        def start(run):
            state = start_new_run(run)
            faults.enter_context(fault())
            return state

        with mock.patch("klinic.replay.single_batch.start_new_run", start):
            check_single_batch(
                recipe, lambda _: None, predict_memory=lambda _: 2**30, result=result
            )
    return {part.name: (part.ok, part.detail) for part in result.components}


def results_of_parts():
    found = {"healthy": compare(learner_on_device())}
    for fault in FAULTS:
        learner = learner_on_device()  # before: loading a model checks its logits as well
        with fault():
            found[fault.__name__] = compare(learner)
    for fault in (nullcontext, a_resume_without_moments, a_read_in_every_chunk):
        learner = learner_on_device()
        with fault():
            found[f"update, {fault.__name__}"] = update(learner)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        # absolute positions: shifted ones are no fault of a rotary model
        recipe = load_recipe(Path(sys.argv[1]), ["model.name=tiny-gpt2"]).recipe
        found = {f.__name__: check_whole(recipe, f) for f in (nullcontext, *FAULTS)}
    else:
        found = results_of_parts()
    sys.stdout.write(json.dumps(found))
