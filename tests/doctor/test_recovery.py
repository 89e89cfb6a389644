"""What is done about trouble: the order, the plan, and that it always ends."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from klinic.doctor.anomalies import Anomaly
from klinic.doctor.recovery import (
    MAX_CUT_FACTOR,
    LRBackoff,
    LRCut,
    RecoveryPlan,
    decide_recovery,
    was_retry,
)

BRAKES = LRBackoff(lr_factor=0.1, lr_steps=50, max_consecutive=5)
GRADIENT = Anomaly(kind="not a number", site="gradient")
WEIGHTS = Anomaly(kind="not a number", site="weights", damaged=True)
REWARDS = Anomaly(kind="not a number", site="reward")
LOST = Anomaly(kind="reward", measured=0.1, limit=0.4, damaged=True)


def decided(plan, trouble, step=57, places=(57,), checkpoint=50):
    return decide_recovery(
        BRAKES, plan, trouble, step=step, batch_indices=places, checkpoint=checkpoint
    )


def test_first_again_then_without_the_batch_then_back_and_in_the_end_it_stops():
    again = decided(RecoveryPlan(), GRADIENT)
    assert (again.act, again.plan.skipped, again.plan.cuts) == ("again", (), ())
    assert again.says == ("gradient: not a number. Nothing was committed; retrying the step.")
    skip = decided(again.plan, GRADIENT)
    assert (skip.act, skip.plan.skipped) == ("skip", (57,))
    assert skip.plan.cuts == (LRCut(first=57, last=106, factor=0.1),)
    assert skip.says == (
        "gradient: not a number, also on retry: persistent. batch 57 skipped, learning rate "
        "x 0.1 for "
        "steps 57 to 106."
    )
    acts, plan, place = [], skip.plan, 58
    while "stop" not in acts:
        decision = decided(plan, GRADIENT, places=(place,))
        acts.append(decision.act)
        plan, place = decision.plan.without_rollback(), decision.plan.next_batch_index(57)
    assert acts == ["again", "roll back"] * 3 + ["again", "stop"]
    assert plan.consecutive == 5
    assert plan.skipped == (57, 58, 59, 60)  # the fifth is not left out: the run has stopped


def test_weights_are_loaded_again_before_anything_is_blamed():
    replay = decided(RecoveryPlan(), WEIGHTS)
    assert (replay.act, replay.plan.back_to, replay.plan.skipped) == ("replay", 50, ())
    assert replay.plan.cuts == ()
    back = decided(replay.plan.without_rollback(), WEIGHTS)
    assert (back.act, back.plan.back_to, back.plan.skipped) == ("roll back", 50, (57,))
    assert back.plan.cuts == (LRCut(first=51, last=100, factor=0.1),)


def test_rewards_that_are_no_numbers_cost_one_more_try_and_then_only_their_rows():
    again = decided(RecoveryPlan(), REWARDS)
    known = decided(again.plan, REWARDS)
    assert (again.act, known.act, known.plan.known) == ("again", "go on", ("reward",))
    assert known.plan.skipped == ()
    later = decided(known.plan, REWARDS, step=80, places=(80,))
    assert (later.act, later.plan) == ("go on", known.plan)


def test_a_lost_reward_is_nobodys_batch():
    back = decided(RecoveryPlan(), LOST)
    assert (back.act, back.plan.skipped, back.plan.back_to) == ("roll back", (), 50)


def test_every_cut_lasts_twice_as_long_as_the_one_before_up_to_a_limit():
    plan, step, lengths = RecoveryPlan(), 10, []
    for _ in range(8):
        plan = decided(plan, LOST, step=step, checkpoint=step - 5).plan.without_rollback()
        lengths.append(plan.cuts[-1].last - plan.cuts[-1].first + 1)
        step += 100
    assert lengths == [50 * min(2**n, MAX_CUT_FACTOR) for n in range(8)]


def test_going_back_makes_cuts_void_that_came_after():
    plan = RecoveryPlan(
        cuts=(LRCut(first=40, last=89, factor=0.1), LRCut(first=55, last=154, factor=0.1))
    )
    back = decided(plan, LOST, step=60, checkpoint=50).plan
    assert [cut.first for cut in back.cuts] == [40, 51]
    assert back.lr_factor(60) == 0.1 * 0.1
    skip = decided(replace(plan, tried=(60, 60)), GRADIENT, step=60, places=(60,)).plan
    assert [cut.first for cut in skip.cuts] == [40, 55, 60]


def test_a_rate_is_cut_twice_at_most_and_the_sentence_says_what_it_is():
    cuts = tuple(LRCut(first=1, last=99, factor=0.1) for _ in range(3))
    assert RecoveryPlan(cuts=cuts).lr_factor(5) == 0.1 * 0.1
    plan = RecoveryPlan(cuts=cuts[:1], num_cuts=1, tried=(9, 9))
    assert "learning rate x 0.01 for steps 9 to 108" in decided(plan, GRADIENT, 9, (9, 10)).says
    assert "batches 9, 10 skipped" in decided(plan, GRADIENT, 9, (9, 10)).says


def test_trouble_that_moves_between_steps_ends_the_run_too():
    plan, acts = RecoveryPlan(), []
    while "stop" not in acts:
        step = 5 + len(acts) % 2
        decision = decided(plan, WEIGHTS, step=step, places=(step,), checkpoint=3)
        acts.append(decision.act)
        plan = decision.plan.without_rollback()
        assert len(acts) < 50
    assert acts[:-1] == ["replay"] * (len(acts) - 1)
    assert "retries without a step after step 6" in decision.says


def test_new_steps_may_be_run_again_as_often_as_there_are():
    plan = RecoveryPlan()
    for step in range(1, 200):
        decision = decided(plan, GRADIENT, step=step, places=(step,))
        assert decision.act == "again"
        plan = decision.plan


def test_a_step_beyond_the_last_trouble_starts_the_count_anew():
    plan = decided(RecoveryPlan(), LOST, step=57).plan
    assert decided(plan, LOST, step=57).plan.consecutive == 2
    assert decided(plan, LOST, step=58).plan.consecutive == 1


def test_only_the_step_that_was_run_again_has_passed():
    plan = decided(RecoveryPlan(), GRADIENT).plan
    assert was_retry(plan, step=57, batch_indices=(57,))
    assert not was_retry(plan, step=57, batch_indices=(58,))
    assert not was_retry(plan, step=56, batch_indices=(57,))


TROUBLES = st.sampled_from([GRADIENT, WEIGHTS, REWARDS, LOST])


@given(st.lists(st.tuples(TROUBLES, st.integers(1, 30)), max_size=30))
def test_what_is_left_out_stays_so_and_a_plan_survives_json(found):
    plan = RecoveryPlan()
    for trouble, step in found:
        after = decided(plan, trouble, step=step, places=(plan.next_batch_index(step - 1),)).plan
        assert after.skipped[: len(plan.skipped)] == plan.skipped
        assert after.num_cuts >= plan.num_cuts
        assert RecoveryPlan.from_json(json.loads(json.dumps(after.to_json()))) == after
        plan = after.without_rollback()


@given(TROUBLES, st.integers(1, 100))
def test_trouble_without_end_ends_the_run(trouble, step):
    """Whatever it is, as long as it is not mild, a step that never comes out well is stopped at."""
    plan, place = RecoveryPlan(), step
    for _ in range(2 * BRAKES.max_consecutive + 1):
        decision = decided(plan, trouble, step=step, places=(place,), checkpoint=step - 1)
        plan = decision.plan.without_rollback()
        place = plan.next_batch_index(step - 1)
        if decision.act == "stop" or (trouble.is_mild and decision.act == "go on"):
            break
    else:
        raise AssertionError("it never stopped")
