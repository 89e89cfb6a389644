"""A user's function is named rightly, and refused in a sentence where it cannot be examined."""

from pathlib import Path

import pytest

from klinic.errors import FunctionError
from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import load_user_function

FILE = Path(__file__).with_name("kl_functions.py")


def examine(name):
    measured = measure(load_user_function(f"{FILE}:{name}"))
    return measured, judge(measured)


def test_k1_in_the_loss_does_nothing():
    measured, judgement = examine("k1")
    assert judgement.verdict == "wrong"
    assert judgement.value == "KL(policy || reference)"
    assert measured.gradient.gradient == "zero"
    assert "averages to zero" in judgement.advice
    assert "k1_reward" in judgement.advice
    assert "unbiased" in judgement.advice


@pytest.mark.parametrize("name", ["k3", "k3_from_the_reference_first"])
def test_k3_is_right_as_a_number_and_another_objective_as_a_loss(name):
    measured, judgement = examine(name)
    assert judgement.verdict == "conditional"
    assert judgement.value == "KL(policy || reference)"
    assert measured.gradient.gradient == "forward_token"
    assert "KL(reference || policy)" in judgement.advice
    assert measured.extremes.overflows_at.above == pytest.approx(88.72, abs=0.02)


def test_the_reversed_k3_is_chi_square():
    measured, judgement = examine("k3_reversed")
    assert judgement.verdict == "wrong"
    assert judgement.value == "chi-square(policy || reference) minus the KL"
    assert measured.gradient.target == "half_chi_square"
    assert "chi-square" in judgement.advice


@pytest.mark.parametrize("name", ["exp_k1_k1", "exp_k1_k1_summed"])
def test_exp_k1_k1_would_need_samples_of_the_reference(name):
    measured, judgement = examine(name)
    assert judgement.verdict == "wrong"
    assert "sampled from the reference" in judgement.value
    assert measured.gradient.gradient == "other"


def test_k2_is_right_as_a_loss_and_not_as_a_number():
    measured, judgement = examine("k2")
    assert judgement.verdict == "correct"
    assert "half the mean squared log-ratio" in judgement.value
    assert measured.gradient.gradient == "reverse_token"


def test_abs_does_not_fade_near_the_reference():
    _, judgement = examine("absolute")
    assert judgement.verdict == "wrong"
    assert "not a KL" in judgement.value
    assert "does not vanish" in judgement.advice


def test_a_clamp_has_a_dead_zone_and_it_is_said_where_it_starts():
    measured, judgement = examine("k3_clamped")
    assert judgement.verdict == "wrong"
    dead = measured.extremes.saturates_at
    assert dead.above == pytest.approx(2.61, abs=0.01)
    assert dead.below == pytest.approx(-11.0, abs=0.01)
    assert "dead zone" in judgement.advice
    assert "d > 2.62" in judgement.advice
    assert "pulls like k3" in judgement.advice


def test_a_clamp_beyond_every_world_is_found_by_the_scan():
    measured, judgement = examine("k3_clamped_far_away")
    assert measured.gradient.gradient == "forward_token"
    assert measured.extremes.saturates_at.above == pytest.approx(13.8, abs=0.1)
    assert "dead zone" in judgement.advice


def test_ratio_times_k3_cancels_in_float32():
    measured, judgement = examine("ratio_k3")
    assert judgement.verdict == "conditional"
    assert measured.gradient.gradient == "reverse_token"
    assert measured.off_policy.gradient == "reverse_token_off_policy"
    assert 13 < measured.extremes.cancels_at.above < 18
    assert "cancellation" in judgement.advice


def test_a_detached_ratio_does_not_help():
    measured, _ = examine("detached_ratio_k3")
    assert measured.gradient.gradient == "forward_token"
    assert measured.off_policy.gradient == "other"


def test_a_function_that_turns_round_beyond_every_world_is_wrong():
    measured, judgement = examine("turns_round")
    assert measured.gradient.gradient == "reverse_token"
    assert measured.departure.reverses_at.below == pytest.approx(-16.0, abs=0.01)
    assert judgement.verdict == "wrong"
    assert "pushes the policy away" in judgement.advice


def test_a_function_that_flattens_out_is_conditional():
    measured, judgement = examine("huber")
    assert judgement.verdict == "conditional"
    assert measured.departure.departs_at.above == pytest.approx(10.0, abs=0.01)
    assert "That gradient has a limited range" in judgement.advice


def test_a_right_function_never_departs():
    for name in ("k2", "k3", "ratio_k3"):
        measured, _ = examine(name)
        cancels = measured.extremes.cancels_at
        assert cancels or not measured.departure.departs_at, name


def test_words_of_an_argument_decide_not_letters():
    measured, judgement = examine("with_threshold")
    assert judgement.verdict == "correct"
    assert measured.off_policy is None


def test_size_does_not_hide_a_gradient():
    measured, _ = examine("huge")
    assert measured.gradient.gradient == "reverse_token"
    assert measured.gradient.scale == pytest.approx(1e6)


@pytest.mark.parametrize("name", ["k2_in_float32", "in_place", "distilled", "squeezed"])
def test_these_are_right_however_they_are_written(name):
    measured, judgement = examine(name)
    assert (judgement.verdict, measured.gradient.gradient) == ("correct", "reverse_token")


def test_precision_is_named():
    assert "computes in float32" in examine("k2_in_float32")[1].advice
    _, judgement = examine("k2_in_bfloat16")
    assert judgement.verdict == "conditional"
    assert "too coarse" in judgement.advice


def test_a_dead_zone_that_ends_in_an_overflow_is_still_one():
    measured, _ = examine("k3_clamped_in_float32")
    assert measured.extremes.saturates_at.above == pytest.approx(2.61, abs=0.01)
    assert measured.extremes.saturates_at.below == pytest.approx(-11.0, abs=0.01)


def test_a_function_that_is_told_the_older_policy_must_correct_for_it():
    measured, judgement = examine("clipped_ratio_k1")
    assert measured.gradient.gradient == "reverse_token"
    assert judgement.verdict == "conditional"
    assert "older policy" in judgement.advice


def test_a_mean_over_the_completion_is_not_a_factor():
    _, judgement = examine("mean_over_the_completion")
    assert judgement.verdict == "conditional"
    assert "Divide" not in judgement.advice
    assert "number of tokens" in judgement.advice


def test_how_arguments_were_read_is_known():
    assert examine("distilled")[0].roles == {"teacher_logp": "logp_ref", "student_logp": "logp"}


def test_the_wrong_sign_is_called_that():
    measured, judgement = examine("wrong_sign")
    assert judgement.verdict == "wrong"
    assert measured.gradient.scale == pytest.approx(-1)
    assert "wrong sign" in judgement.advice
    assert "away from the reference" in judgement.advice


def test_a_factor_is_found():
    measured, judgement = examine("twice")
    assert judgement.verdict == "conditional"
    assert measured.gradient.scale == pytest.approx(2)
    assert "Divide it by 2" in judgement.advice


def test_a_detached_value_has_no_gradient():
    _, judgement = examine("detached")
    assert judgement.verdict == "wrong"
    assert "No gradient flows" in judgement.advice


def test_functions_of_logits_and_of_whole_completions():
    measured, judgement = examine("exact")
    assert (judgement.verdict, measured.gradient.gradient) == ("correct", "reverse_token")
    measured, judgement = examine("forward")
    assert (judgement.verdict, judgement.value) == ("conditional", "KL(reference || policy)")
    measured, judgement = examine("squared_sum")
    assert (judgement.verdict, measured.gradient.gradient) == ("correct", "reverse_sequence")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (f"{FILE}:mean", "one KL per token"),
        (f"{FILE}:three_things", r"takes \(logp, logp_ref, temperature\)"),
        (f"{FILE}:raises", "ZeroDivisionError: no tokens"),
        (f"{FILE}:number", "returned float"),
        (f"{FILE}:missing", "has no function 'missing'. It has: absolute"),
        (f"{FILE}:random", "different values for the same inputs"),
        (f"{FILE}:not_a_number", "NaN or infinity for 384 of 384"),
        (f"{FILE}:exits", "SystemExit: 3"),
        (f"{FILE}:in_place_too_late", "cannot be differentiated"),
        ("nowhere.py:f", "not a file"),
        ("no_such_module_here:f", "cannot be imported"),
        ("k3", "is not a function name"),
    ],
)
def test_what_cannot_be_examined_is_refused_in_a_sentence(target, sentence):
    with pytest.raises(FunctionError, match=sentence):
        measure(load_user_function(target))


def test_a_file_finds_its_neighbours_and_sees_no_arguments_of_ours(tmp_path):
    folder = tmp_path / "losses"
    folder.mkdir()
    (folder / "neighbour_of_kl.py").write_text("HALF = 0.5\n")
    (folder / "my_kl_file.py").write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_kl import HALF\n"
        "assert len(sys.argv) == 1\n"
        "@dataclass\n"
        "class Settings:\n"
        "    half: float = HALF\n"
        "def kl(logp, logp_ref):\n"
        "    return Settings().half * (logp - logp_ref) ** 2\n"
    )
    assert judge(measure(load_user_function(f"{folder}/my_kl_file.py:kl"))).verdict == "correct"


def test_a_module_that_exits_while_it_is_imported_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(FunctionError, match="SystemExit"):
        load_user_function(f"{script}:f")
