"""Sampling ahead with pretend parts: how old a batch may be, what overlaps, what trouble does."""

import threading

import pytest
from test_loop import Pretend

from klinic.doctor.anomalies import Anomaly
from klinic.errors import LogitsError
from klinic.training.guards import StepAnomalyError
from klinic.training.loop import run_async_loop
from klinic.training.state import LoopState


class Overlapping(Pretend):
    """Parts that write down which batches were sampled, and whether weights moved meanwhile."""

    def __init__(self, **how):
        super().__init__(**how)
        self.steps = []
        self.before_sample = lambda _step: None
        self.before_keep = lambda _step: None

    def load(self, weights):
        assert weights.version == self._version, "what is sent is what was published"
        return super().load(weights)

    def sample(self, prompts, *, step):
        self.steps.append(step)
        self.before_sample(step)
        yield from super().sample(prompts, step=step)

    def record_step(self, completed, state):
        self.before_keep(completed.step)
        return super().record_step(completed, state)


def trained(parts, most, state=None):
    return run_async_loop(parts, state or LoopState(), max_staleness=most)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_batch_is_older_than_allowed_and_some_are_that_old(most):
    parts = Overlapping(max_steps=8)
    # every batch that may be sampled is, before the learner goes on
    started = [threading.Event() for _ in range(10)]
    parts.before_sample = lambda step: started[step].set()
    parts.before_keep = lambda step: started[min(step + most, 8)].wait(10)
    assert trained(parts, most).step == 8
    ages = [metrics["sampling/staleness"] for metrics in parts.metrics]
    assert max(ages) == most
    assert parts.steps == list(range(1, 9)), "each batch once, in order"


def test_sampling_and_learning_overlap():
    parts = Overlapping(max_steps=2)
    both = threading.Barrier(2, timeout=10)
    parts.before_sample = lambda step: both.wait() if step == 2 else None
    parts.before_keep = lambda step: both.wait() if step == 1 else None
    assert trained(parts, 1).step == 2  # neither would pass the barrier alone


def test_a_stop_leaves_no_thread_behind():
    parts = Overlapping(max_steps=9, stop_after=2)
    assert trained(parts, 2).step == 2
    assert not [t for t in threading.enumerate() if t.name == "klinic-ahead"]


def test_trouble_begins_again_behind_the_state_that_is_gone_back_to():
    parts = Overlapping(max_steps=3)
    told = []

    def keep_or_trouble(step):
        if step == 2 and not told:
            told.append(step)
            trouble = Anomaly(kind="KL", measured=1.0, limit=0.5, damaged=True)
            raise StepAnomalyError(trouble, (2,), {})

    parts.before_keep = keep_or_trouble
    parts.recover = lambda found, state: state
    assert trained(parts, 1).step == 3
    # what was sampled ahead of the trouble is not used: its batch is sampled again
    assert parts.steps.count(2) == 2
    assert "discard" in parts.calls


def test_what_the_sampler_raises_is_raised_in_the_step_that_needed_it():
    parts = Overlapping(max_steps=3)

    def fail(step):
        if step == 2:
            raise LogitsError("not numbers")

    parts.before_sample = fail
    with pytest.raises(LogitsError, match="not numbers"):
        trained(parts, 2)
    assert [call for call in parts.calls if call.startswith("keep")] == ["keep 1"]
