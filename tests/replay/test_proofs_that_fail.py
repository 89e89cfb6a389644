"""A proof is worth something because it can come out otherwise."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import klinic
from klinic.lab.scoreboard_run import train_trial
from klinic.replay import proof
from klinic.replay.changes import CHANGES
from klinic.replay.learner_changes import measure_logged_kl, measure_regrading
from klinic.replay.replay import Replay

pytestmark = [
    pytest.mark.slow,  # a run, and a replay of it for each
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("warm"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("proofs") / "well"


@pytest.fixture
def replay(run, warm):
    if not run.exists():
        train_trial(run, **{"loop.max_steps": 2})
    return Replay(run, 2)


def confirmed(cause, measured):
    return CHANGES[cause].holds(*measured)


def test_a_kl_that_was_told_rightly_is_not_proved_wrong(replay):
    assert measure_logged_kl(replay) == (0, 0)
    assert not confirmed("wrong-metric", measure_logged_kl(replay))


def test_a_kl_that_was_told_as_recorded_is_not_proved_wrong_where_the_record_is(replay):
    replay.record = replace(replay.record, logp_ref=replay.record.logp_ref - 0.3)
    before, after = measure_logged_kl(replay)
    assert after > before
    assert not confirmed("wrong-metric", (before, after))


def test_rewards_that_are_theirs_are_not_proved_broken(replay):
    assert measure_regrading(replay) == (1, 1)
    assert not confirmed("broken-reward", measure_regrading(replay))


def test_rewards_that_differ_every_time_are_not_proved_to_be_in_another_order(replay):
    random = np.random.default_rng(0)
    replay.run = SimpleNamespace(
        parts=replay.run.parts,
        score_rollouts=lambda rows: SimpleNamespace(total=random.random(len(rows))),
    )
    before, after = measure_regrading(replay)
    assert (before, after) == (0, 0)
    assert not confirmed("broken-reward", (before, after))


def test_rewards_in_another_order_are_proved_so(replay):
    replay.record = replace(replay.record, reward=np.roll(replay.record.reward, 1))
    assert confirmed("broken-reward", measure_regrading(replay))


def test_where_rewards_were_handed_over_there_is_no_proof(replay, run, monkeypatch):
    replay.can_grade = False
    assert measure_regrading(replay) is None
    monkeypatch.setattr(proof, "Replay", lambda folder, step, **_: replay)
    assert proof.prove_cause(run, "broken-reward", 2) is None


def test_rewards_that_python_handed_over_cannot_be_asked_again(tmp_path):
    klinic.train(
        model="tiny",
        reward_funcs=lambda prompts, completions, **columns: [float(len(c)) for c in completions],
        train_dataset=[{"prompt": f"{n}="} for n in range(4)],
        max_steps=1,
        prompts_per_step=4,
        group_size=2,
        max_new_tokens=4,
        threads=1,
        **{"output.trackers": [], "output.dir": str(tmp_path / "own")},
    )
    assert not Replay(tmp_path / "own", 1).can_grade
