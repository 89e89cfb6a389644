"""Mistakes that people make in these formulas, each as one edit of our own source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One edit: in which file of `klinic/maths`, what stands there, and what is put instead."""

    name: str
    file: str
    right: str
    wrong: str
    caught_by: str = "verify"
    """`verify`, or the test in tests/maths where an expectation cannot show it."""


MUTANTS = (
    Mutant(
        name="a sign: k1",
        file="kl.py",
        right="return logp_p - logp_q",
        wrong="return logp_q - logp_p",
    ),
    Mutant(
        name="a factor: k2 without its half",
        file="kl.py",
        right="** 2 / 2",
        wrong="** 2",
    ),
    Mutant(
        name="a direction: k3",
        file="kl.py",
        right="d = logp_q - logp_p",
        wrong="d = logp_p - logp_q",
    ),
    Mutant(
        name="exp for expm1",
        file="kl.py",
        right=".expm1(d) - d",
        wrong=".exp(d) - 1 - d",
        caught_by="test_kl.py::test_k3_keeps_its_digits_in_float32_where_the_usual_form_has_none",
    ),
    Mutant(
        name="a direction: exact",
        file="kl.py",
        right="xp.exp(logp_p) * log_ratio",
        wrong="xp.exp(logp_q) * log_ratio",
    ),
    Mutant(
        name="-inf minus -inf",
        file="kl.py",
        right="possible = logp_p != -math.inf",
        wrong="possible = logp_p < 1",
        caught_by="test_kl.py::test_excluded_tokens_leave_the_gradient_finite",
    ),
    Mutant(
        name="a rest bucket left out",
        file="kl.py",
        right="rest[..., None]]",
        wrong="rest[..., None] - 1e9]",
    ),
    Mutant(
        name="a rest by subtraction",
        file="kl.py",
        right="rest = logsumexp(fill_last(logp, token_ids, -math.inf))",
        wrong="p = 2.718281828459045 ** take_last(logp, token_ids)\n"
        "    rest = namespace(logp).log1p(-p.sum(-1))",
        caught_by="test_kl.py::test_a_small_rest_keeps_its_digits_in_float32",
    ),
    Mutant(
        name="a missing stop-gradient: the coefficient",
        file="score.py",
        right="stop_gradient(coef) *",
        wrong="coef *",
        caught_by="test_kl_gradient.py::test_no_gradient_flows_through_a_coefficient",
    ),
    Mutant(
        name="a missing stop-gradient: the value",
        file="score.py",
        right="stop_gradient(value) +",
        wrong="value +",
    ),
    Mutant(
        name="a missing stop-gradient: the logp",
        file="score.py",
        right="(logp - stop_gradient(logp))",
        wrong="(logp - logp)",
    ),
    Mutant(
        name="a missing importance weight",
        file="kl_gradient.py",
        right="coef = inputs.weight * kl.k1(**inputs.policy_and_ref)",
        wrong="coef = kl.k1(**inputs.policy_and_ref)",
    ),
    Mutant(
        name="a clamp: on k1",
        file="kl_gradient.py",
        right="coef = inputs.weight * kl.k1(**inputs.policy_and_ref)",
        wrong="coef = inputs.weight * kl.k1(**inputs.policy_and_ref).clip(-20, 20)",
    ),
    Mutant(
        name="a clamp: on k3",
        file="kl.py",
        right=".expm1(d) - d",
        wrong=".expm1(d).clip(max=10) - d",
    ),
    Mutant(
        name="the present counted as future",
        file="kl_gradient.py",
        right="inputs.row_offsets) - kl_exact",
        wrong="inputs.row_offsets)",
        caught_by="test_kl_gradient.py::test_sequence_pulls_by_the_future_less_that_of_the_others",
    ),
    Mutant(
        name="no future at all",
        file="kl_gradient.py",
        right="kl_exact + score(coef, logp=inputs.logp)",
        wrong="kl_exact",
    ),
    Mutant(
        name="a baseline that knows its own row",
        file="kl_gradient.py",
        right="(total - values)",
        wrong="(total)",
    ),
    Mutant(
        name="a baseline across groups",
        file="kl_gradient.py",
        right="place = group[row] * longest + position",
        wrong="place = position",
    ),
    Mutant(
        name="reward now for reward to go",
        file="kl_gradient.py",
        right="cost = sum_to_go(inputs.k1_old, inputs.row_offsets)",
        wrong="cost = inputs.k1_old",
    ),
    Mutant(
        name="a cap where none is promised",
        file="kl_gradient.py",
        right="replace(inputs, ratio_cap=math.inf).weight",
        wrong="inputs.weight.clip(max=1.2)",
    ),
    Mutant(
        name="an overflow before the cap",
        file="ratio.py",
        right="namespace(log_ratio).exp(log_ratio.clip(max=math.log(cap)))",
        wrong="namespace(log_ratio).exp(log_ratio).clip(max=cap) * 1.0",
        caught_by="test_ratio.py::test_a_weight_at_its_cap_passes_no_gradient_and_no_overflow",
    ),
    Mutant(
        name="a ratio upside down",
        file="ratio.py",
        right="log_ratio = logp - logp_sampler",
        wrong="log_ratio = logp_sampler - logp",
    ),
    Mutant(
        name="a wrong mask",
        file="masked.py",
        right=".where(loss_mask, values, 0.0)",
        wrong=".where(~loss_mask, values, 0.0)",
    ),
    Mutant(
        name="a mask by multiplication",
        file="masked.py",
        right="namespace(values).where(loss_mask, values, 0.0)",
        wrong="values * loss_mask",
        caught_by="test_kl_gradient.py::test_what_stands_outside_the_mask_changes_nothing",
    ),
    Mutant(
        name="no mask on the KL",
        file="kl_estimators.py",
        right=".term(inputs.clean())",
        wrong=".term(inputs)",
        caught_by="test_kl_gradient.py::test_what_stands_outside_the_mask_changes_nothing",
    ),
    Mutant(
        name="a wrong denominator: rows for tokens",
        file="masked.py",
        right="/ length.clip(min=1)[row] / num_rows",
        wrong="/ num_rows",
        caught_by="test_masked.py::test_each_mean_is_what_its_name_says",
    ),
    Mutant(
        name="a wrong denominator: all rows",
        file="masked.py",
        right="(length > 0).sum()",
        wrong="(length >= 0).sum()",
        caught_by="test_masked.py::test_each_mean_is_what_its_name_says",
    ),
    Mutant(
        name="rows off by one",
        file="arrays.py",
        right='side="right"',
        wrong='side="left"',
    ),
    Mutant(
        name="sums across rows",
        file="arrays.py",
        right="xp.where(row[:-reach] == row[reach:], total[reach:], 0.0)",
        wrong="total[reach:]",
    ),
    Mutant(
        name="a group mean for leave-one-out",
        file="advantage.py",
        right="* size / (size - 1).clip(min=1)",
        wrong="* 1.0",
    ),
    Mutant(
        name="a variance for a standard deviation",
        file="advantage.py",
        right="_group_mean(centred**2, group).clip(min=_square(floor)) ** 0.5",
        wrong="_group_mean(centred**2, group).clip(min=_square(floor))",
        caught_by="test_advantage.py::test_the_group_std_makes_it_depend_on_the_rewards",
    ),
    Mutant(
        name="a mean over the step for one over the group",
        file="advantage.py",
        right="return below - _group_mean(below, group)",
        wrong="return below - below.mean()",
        caught_by="test_advantage.py::test_no_advantage_passes_the_root_of_the_group_less_one",
    ),
    Mutant(
        name="a sign: the policy term",
        file="surrogate.py",
        right="return -namespace(ratio).minimum(",
        wrong="return namespace(ratio).minimum(",
    ),
    Mutant(
        name="optimistic clipping",
        file="surrogate.py",
        right=".minimum(ratio",
        wrong=".maximum(ratio",
        caught_by="test_surrogate.py::test_clipping_is_pessimistic",
    ),
    Mutant(
        name="a token's ratio for the row's",
        file="surrogate.py",
        right="return _pessimistic(ratio, advantage, inputs)",
        wrong="return _pessimistic(token_ratio(logp=logp, logp_old=logp_old), advantage, inputs)",
        caught_by="test_surrogate.py::test_gspo_spreads_one_ratio_over_the_row",
    ),
    Mutant(
        name="a coefficient that remembers NaN",
        file="kl_coef.py",
        right="if not math.isfinite(kl):\n        return state",
        wrong="pass",
        caught_by="test_kl_coef.py::test_a_measurement_that_is_not_finite_changes_nothing",
    ),
    Mutant(
        name="a controller that runs away",
        file="kl_coef.py",
        right="rule.integral * error + rule.proportional * change",
        wrong="-rule.integral * error - rule.proportional * change",
        caught_by="test_kl_coef.py::test_log_pi_has_an_integral_and_a_proportional_part",
    ),
    Mutant(
        name="a logarithm of a negative KL",
        file="kl_coef.py",
        right="-1.0 if smoothed <= 0 else",
        wrong="0.0 if smoothed <= 0 else",
        caught_by="test_kl_coef.py::test_log_pi_takes_no_logarithm_of_a_negative_kl",
    ),
    Mutant(
        name="a band the wrong way round",
        file="kl_coef.py",
        right="BAND_UP, BAND_DOWN = 1.5, 0.75",
        wrong="BAND_UP, BAND_DOWN = 0.75, 1.5",
        caught_by="test_kl_coef.py::test_the_band_rule_has_its_published_edges",
    ),
)
