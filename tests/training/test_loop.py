"""The loop with pretend parts: what is called, in which order, with which coefficient."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from klinic.evidence.metrics import mean_k1, updates_metrics
from klinic.evidence.record import StepRecord
from klinic.learner.objective import Objective, loss_targets
from klinic.learner.protocol import PreparedUpdate
from klinic.learner.scored_batch import ScoredBatch
from klinic.maths.kl_coef import KLCoefState
from klinic.model.weights import Weights
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import (
    DataSection,
    KLSection,
    LearnerSection,
    LoopSection,
    ModelSection,
    ReferenceSection,
)
from klinic.rewards.scores import StepRewards
from klinic.sampler.protocol import LoadResult
from klinic.training.guards import StepGuard
from klinic.training.loop import run_loop
from klinic.training.state import LoopState
from tiny_policies import batch_of, rollouts

MADE = rollouts(num_prompts=2, group_size=2)
GROUPS = [MADE[:2], MADE[2:]]
OBJECTIVE = Objective(
    loss="grpo",
    estimator="unbiased",
    clip_low=0.2,
    clip_high=0.2,
    mask_truncated=False,
    max_new_tokens=8,
)


def recipe_with(*, max_steps=3, updates=1, warmup=0, kl=None, rule=None):
    return Recipe(
        model=ModelSection(name="tiny"),
        data=DataSection(task="arithmetic"),
        kl=KLSection(coef=0.1) if rule is not None else kl,
        reference=rule or ReferenceSection(),
        loop=LoopSection(max_steps=max_steps),
        learner=LearnerSection(updates_per_batch=updates, reward_warmup_steps=warmup),
    )


class Pretend:
    """Parts that write down what they are asked."""

    def __init__(self, *, finite=lambda _step: True, stop_after=None, **settings):
        self.recipe = recipe_with(**settings)
        self.moves, self.events = [], []
        self.learner = self.sampler = self
        self.sampler_lock, self._weights_lock = threading.RLock(), threading.RLock()
        self.calls, self.coefs, self.asked = [], [], []
        self.rows: list[list[int]] = []
        self.events, self.metrics, self.scales = [], [], []
        self._finite, self._stop_after, self._version = finite, stop_after, 0

    def publish(self):
        return Weights(version=self._version, fingerprint=f"v{self._version}", location="process")

    def hold_weights(self):
        return self._weights_lock

    def stream_weights(self, dtype=None):
        raise NotImplementedError

    completion_logits = greedy = stream_weights

    def load(self, weights):
        self.calls.append(f"load {weights.version}")
        return LoadResult(fingerprint=weights.fingerprint)

    def record_sync(self, loaded, step):
        assert loaded.probe_result == {}

    def make_guard(self, state):
        return StepGuard(
            None, state.history, tolerated_sites=(), expected_batch=state.batch_index + 1
        )

    def recover(self, anomaly, state):
        raise anomaly

    def run_probes(self, batch, record, kl_coef):
        pass

    def probe(self, record, *, kl_coef):
        return {}

    def update_kl(self, scored, before):
        return 0.0

    def measure(self, first, last, *, clip, kl_coef):
        return updates_metrics(first.record, last.record, clip=clip, kl_coef=kl_coef)

    def sequence_kl(self, scored):
        return None

    def save(self, folder):
        return {}

    def lr_factor(self, step):
        return 1.0

    def open_records(self, run):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError

    def next_batch_index(self, batch_index):
        return batch_index + 1

    def all_finite(self):
        return {"weights": True, "optimizer": True}

    def prompt_batch(self, batch_index):
        return [group[0].prompt for group in GROUPS]

    def sample(self, prompts, *, step):
        yield from reversed(GROUPS)  # as they finish, not as they were asked for

    extend = sample

    def score_rollouts(self, made):
        total = np.arange(len(made), dtype=np.float64)
        return StepRewards(total=total, parts={}, num_missing=0, num_nonfinite=0)

    def make_record(self, batch, step):
        made = [batch.rollouts[row] for row in batch.chosen]
        self.rows.append([r.prompt.index for r in made])
        return batch_of(made, step=step)

    def score(self, record: StepRecord, *, needs_reference):
        self.asked.append(needs_reference)
        targets = loss_targets(record, OBJECTIVE, torch.empty(0))
        return ScoredBatch(record=record, batches=[], targets=targets, ref_hidden=[])

    def prepare(self, scored, scales):
        self.coefs.append(scales.kl_coef)
        self.scales.append(scales.reward)
        logp = np.full(scored.record.num_tokens, -1.0)
        record = replace(scored.record, logp_old=logp, logp=logp, logp_ref=logp - 0.2)
        return PreparedUpdate(
            record=record,
            metrics={},
            finite_at={"loss": self._finite(record.step)},
            mean_k1=mean_k1(record),
        )

    def commit(self, *, lr_factor):
        self.calls.append("commit")
        with self.hold_weights():
            self._version += 1
        return {}

    def discard(self):
        self.calls.append("discard")

    def move_reference(self, step, *, keep, forget_moments):
        self.calls.append(f"move {step}")
        self.moves.append((step, keep, forget_moments))
        return {"kind": "copy", "digest": f"v{self._version}", "step": step, "jumped": step}

    def record_step(self, completed, state):
        self.calls.append(f"keep {completed.step}")
        self.done = completed
        self.metrics.append(completed.metrics)
        return completed.step != self._stop_after

    def record_event(self, step, name, message, facts=None):
        self.events.append((step, name, message, facts))


def test_a_step_loads_what_the_last_one_committed_and_rows_are_in_order():
    parts = Pretend()
    state = run_loop(parts, LoopState())
    assert state.step == 3
    assert parts.calls == [
        word for step in (1, 2, 3) for word in (f"load {step - 1}", "commit", f"keep {step}")
    ]
    assert parts.rows == [[0, 0, 1, 1]] * 3
    assert parts.done.record.facts["weights_published"] == "v2"


def test_without_kl_no_reference_is_asked_for():
    parts = Pretend()
    run_loop(parts, LoopState())
    assert parts.asked == [False] * 3
    assert parts.coefs == [0.0] * 3


def test_at_coefficient_zero_the_reference_is_only_looked_at_when_due():
    kl = KLSection(coef=0.0, monitor_every=2)
    parts = Pretend(max_steps=5, kl=kl)
    run_loop(parts, LoopState(kl=KLCoefState(coef=0.0)))
    assert parts.asked == [True, False, True, False, True]
    assert parts.coefs == [0.0] * 5


def test_warm_up_scales_what_is_used_and_still_measures():
    kl = KLSection(coef=0.1, warmup_steps=2)
    parts = Pretend(max_steps=4, kl=kl)
    run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
    assert parts.coefs == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert parts.asked == [True] * 4


def test_a_warm_up_of_the_reward_rises_from_zero_and_leaves_the_coefficient_alone():
    parts = Pretend(max_steps=6, warmup=4, kl=KLSection(coef=0.1))
    run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
    assert parts.scales == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert parts.coefs == [0.1] * 6
    assert [metrics["reward_scale"] for metrics in parts.metrics] == parts.scales


def test_a_warm_up_of_the_reward_goes_on_where_it_was():
    parts = Pretend(max_steps=4, warmup=4)
    run_loop(parts, LoopState(step=2))
    assert parts.scales == [0.5, 0.75]


def test_without_a_warm_up_the_reward_counts_in_full_and_nothing_is_shown():
    parts = Pretend()
    run_loop(parts, LoopState())
    assert parts.scales == [1.0] * 3
    assert not any("reward_scale" in metrics for metrics in parts.metrics)


def test_the_controller_moves_the_coefficient_of_the_next_step():
    kl = KLSection(coef=0.1, controller="ziegler", target=0.05)
    parts = Pretend(max_steps=3, kl=kl)
    state = run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
    # the KL of step 1 is that before any update
    assert parts.coefs[0] == parts.coefs[1] == 0.1
    assert parts.coefs[1] < parts.coefs[2] < state.kl.coef


@pytest.mark.parametrize("controller", ["band", "ziegler", "dual_ascent", "log_pi"])
def test_a_controller_waits_for_the_first_kl_that_its_own_coefficient_made(controller):
    kl = KLSection(coef=0.1, controller=controller, target=0.05, warmup_steps=2)
    parts = Pretend(max_steps=4, kl=kl)
    state = run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
    assert parts.coefs == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert state.kl.num_updates == 1


def test_a_cap_holds_every_controller_and_a_long_stay_is_told_once():
    for controller in ("band", "ziegler", "dual_ascent", "log_pi"):
        kl = KLSection(coef=0.1, controller=controller, target=0.05, max_coef=0.11)
        parts = Pretend(max_steps=60, kl=kl)
        run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
        assert parts.coefs[-1] == 0.11
        ((step, name, sentence, facts),) = parts.events
        assert name == "kl coefficient held"
        assert parts.coefs[step - 10 : step] == [0.11] * 10
        assert parts.coefs[step - 11] < 0.11
        assert "has been at 0.11, its upper bound (kl.max_coef), for 11 steps" in sentence
        assert facts["kl"] == pytest.approx(0.2)
        sides = [metrics["kl_coef/saturated"] for metrics in parts.metrics]
        assert sides == [float(coef == 0.11) for coef in parts.coefs]


def test_a_fixed_coefficient_has_no_controller_to_show():
    parts = Pretend(max_steps=20, kl=KLSection(coef=0.1))
    run_loop(parts, LoopState(kl=KLCoefState(coef=0.1)))
    assert parts.events == []
    assert not any("kl_target" in metrics for metrics in parts.metrics)


def test_an_update_that_is_not_a_number_is_not_made():
    parts = Pretend(finite=lambda step: step != 2)
    run_loop(parts, LoopState())
    assert parts.calls.count("commit") == 2
    assert parts.calls.count("discard") == 1
    assert parts.calls[-3] == "load 1"


def test_several_updates_use_one_scoring():
    parts = Pretend(max_steps=1, updates=3)
    run_loop(parts, LoopState())
    assert parts.calls == ["load 0", "commit", "commit", "commit", "keep 1"]
    assert len(parts.asked) == 1


def test_it_stops_when_told_and_goes_on_where_it_was():
    parts = Pretend(max_steps=5, stop_after=2)
    state = run_loop(parts, LoopState())
    assert state.step == 2
    again = Pretend(max_steps=5)
    run_loop(again, state)
    assert [call for call in again.calls if call.startswith("keep")] == [
        "keep 3",
        "keep 4",
        "keep 5",
    ]


def test_a_reference_is_reset_after_its_steps_and_before_they_are_kept():
    parts = Pretend(max_steps=5, rule=ReferenceSection(reset_every=2, reset_optimizer=True))
    run_loop(parts, LoopState())
    assert parts.moves == [(2, 0.0, True), (4, 0.0, True)]
    assert [(step, name) for step, name, _, _ in parts.events] == [
        (2, "reference"),
        (4, "reference"),
    ]
    _, _, sentence, facts = parts.events[0]
    assert sentence == "the reference is now the policy after step 2; the AdamW moments are reset."
    assert facts == {"kind": "copy", "digest": "v2"}
    calls = parts.calls
    assert calls.index("move 2") == calls.index("keep 2") - 1


def test_an_average_moves_after_every_step_that_was_committed():
    parts = Pretend(max_steps=4, finite=lambda step: step != 2, rule=ReferenceSection(ema=0.9))
    run_loop(parts, LoopState())
    assert parts.moves == [(step, 0.9, False) for step in (1, 3, 4)]


def test_a_plateau_is_remembered_from_step_to_step_and_no_longer_than_needed():
    parts = Pretend(max_steps=7, rule=ReferenceSection(reset_every=2, on_plateau=True))
    state = run_loop(parts, LoopState())
    # every step has the same reward, and the first two have none before them
    assert [step for step, _, _ in parts.moves] == [4, 6]
    assert state.rewards == (1.5,) * 4
    assert "mean reward 1.5000 in the last 2 steps, 1.5000 before" in parts.events[0][2]
