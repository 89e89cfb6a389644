"""The importance weight of a user's function is examined from ratios of exp(-10) to exp(10)."""

from pathlib import Path

import pytest
import torch

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import UserFunction, load_user_function

WRONG = Path(__file__).with_name("wrong_kl_functions.py")
ROLES = {name: name for name in ("logp", "logp_ref", "logp_old")}


def examine(name):
    measured = measure(load_user_function(f"{WRONG}:{name}"))
    return measured.off_policy.ratio_range, judge(measured)


def weigh(weigh_ratio, *, per_completion=False):
    """Return the verdict on a detached weight, as a function of the ratio."""

    def kl(logp, logp_ref, logp_old):
        log_ratio, k1 = logp - logp_old, logp - logp_ref
        if per_completion:
            log_ratio, k1 = log_ratio.sum(-1), k1.sum(-1)
        return weigh_ratio(log_ratio.exp()).detach() * k1**2 / 2

    measured = measure(UserFunction(name="kl", call=kl, roles=ROLES))
    return measured.off_policy, judge(measured).verdict


def test_a_mask_is_conditional_and_its_threshold_named():
    ratio_range, judgement = examine("ratio_masked_above_10")
    assert (judgement.verdict, ratio_range.masked_above) == ("conditional", 10.0)
    assert "ratio above 10 get no gradient" in judgement.advice


def test_a_mask_by_completion_is_found_too():
    ratio_range, judgement = examine("completion_ratio_masked_above_50")
    assert (judgement.verdict, ratio_range.masked_above) == ("conditional", 50.0)


def test_a_weight_of_the_wrong_sign_is_wrong():
    ratio_range, judgement = examine("ratio_flipped_above_10")
    assert (judgement.verdict, ratio_range.reverses_at) == ("wrong", 10.0)
    assert "pushes the policy away" in judgement.advice


def test_a_floor_is_named():
    ratio_range, judgement = examine("ratio_with_a_floor")
    assert (judgement.verdict, ratio_range.departs_below) == ("conditional", 0.05)
    assert "ratios below 0.05" in judgement.advice


def test_a_cap_whose_gradient_is_lost_is_no_cap():
    ratio_range, judgement = examine("live_ratio_capped_at_10")
    assert (ratio_range.cap, ratio_range.departs_above) == (None, 10.0)
    assert judgement.verdict == "conditional"


@pytest.mark.parametrize("per_completion", [False, True])
@pytest.mark.parametrize("cap", [1.5, 10.0, 300.0, 9000.0])
def test_a_cap_is_fine_at_any_size(cap, per_completion):
    off_policy, verdict = weigh(lambda ratio: ratio.clamp(max=cap), per_completion=per_completion)
    assert (verdict, off_policy.ratio_cap) == ("correct", pytest.approx(cap))


@pytest.mark.parametrize("threshold", [0.002, 0.3, 3.0, 40.0, 5000.0])
def test_any_other_weight_beyond_a_threshold_is_never_correct(threshold):
    def beyond(ratio):
        return ratio > threshold if threshold > 1 else ratio < threshold

    for other in (0.0, -1.0, 2.0):
        weigh_ratio = lambda ratio: torch.where(beyond(ratio), other * ratio, ratio)  # noqa: B023, E731
        off_policy, verdict = weigh(weigh_ratio)
        assert verdict == ("wrong" if other < 0 else "conditional"), (other, off_policy)


def test_the_uncapped_ratio_has_no_limit():
    off_policy, verdict = weigh(lambda ratio: ratio)
    assert verdict == "correct"
    assert off_policy.ratio_cap is None
    assert off_policy.ratio_range.is_right
