"""broken-reward: rewards are missing, wrong, or in another order than the completions."""

import math

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    ProbeEntry,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.reward_evidence import (
    NUM_ERRORS,
    AnswerPay,
    EmptyPay,
    PromptLevels,
    RegradedPay,
    RewardNoise,
    add_regraded_pay,
    concatenate_statistics,
    count_empty_pay,
    count_levels,
    count_paid_answers,
    measure_noise,
    recent_statistics,
)
from klinic.checks.reward_order import find_reward_order

MAX_MISSING_FRACTION = 0.2  # fraction without a reward: more than an occasional timeout
MIN_SAME_FRACTION = 0.9  # fraction of completions that must get the same reward again
MAX_NOISE_FRACTION = 0.5  # of the variance: noisy judges agree with themselves more than by half
MIN_REPEATS = 10  # completions that repeat another of their prompt
MIN_PROMPTS = 44  # equal-rewards limits equal groups to 90%, and 0.9^44 is below 1%
MIN_OTHERS = 0.1  # fraction of prompts with another reward than most: else the task may be solved
MIN_RIGHT = 16  # completions with the dataset's number: a function that reads it pays one of them
MIN_ALIKE = 4  # prompts with equal pay for all answers, or none for right ones
MIN_ALIKE_FRACTION = 0.1  # of them and of those that tell the answers apart
MIN_UNPAID_FRACTION = 0.2  # of the prompts with right completions: a format may cost one of them
MAX_MIXED_FRACTION = 0.1  # of these prompts: pay that depends on more than the prompt
MIN_EMPTY = 16  # completions that end at once, of MIN_ALIKE prompts
MIN_EMPTY_BEST = 0.9  # of them that get the highest reward
MAX_OTHERS_BEST = 0.5  # of all others: where most get it, the reward is for something else
MIN_ANSWERED = 32  # a function that pays for one prompt in five pays none of 32 in 0.08%


def judge_case(case: Case) -> Finding:
    """Flag rewards that do not belong to their completions.

    Looks for
        Infinite and missing rewards; over the recent steps, the variance of the rewards of
        equal completions of one prompt, as recorded and in other orders, prompts whose
        different completions all get one reward, the pay of empty completions and of those that
        state the dataset's answer; in a dump of texts, the pay of right and wrong numbers; and,
        if the task has reference answers, the rewards of correct answers and of the same
        completions graded again in another order.
    Why it matters
        One infinite value makes a batch NaN, a failing parser returns 0 forever, a timeout that
        counts as wrong is noise, and a cache without the completion in its key pays nothing for
        an answer. The spread of the rewards looks healthy.
    Confirmed when
        A reward is infinite, or a fifth is missing; or, by three standard errors, half of the
        variance of the rewards remains between equal completions, and a fifth of them deviates;
        or a tenth of it does, and none in another order of the rewards or with those of the
        next step;
        or none of 44 prompts with different completions has two rewards, while prompts differ;
        or a function that reads the answer pays it more in none of 32 prompts; or none of 16
        right numbers is paid, or none in a fifth of the prompts and all in the others; or one
        in ten prompts pays all of its wrong answers, and others only right ones; or nine in ten
        empty completions get the highest reward, and fewer than half of the others; or fewer
        than nine in ten completions get the same reward again; or, before training, correct
        answers get no more than wrong ones.
    Ruled out when
        Equal completions have equal rewards, or a judge's noise is small, and correct answers
        get the highest.
    Confused with
        equal-rewards (rewards are correct and all the same); reward-hacking (rewards follow
        their definition, and the definition can be exploited).
    """
    record = case.record
    assert record.reward is not None  # noqa: S101 - needed
    missing = float((~np.isfinite(record.reward)).mean()) if record.num_rows else 0.0
    pooled = concatenate_statistics(recent_statistics(case))
    noise, levels = measure_noise(pooled), count_levels(pooled)
    pay = count_paid_answers(case.recent_records)
    figures = {"missing": missing, "noise": noise.fraction}
    fault = (
        _step_fault(case, missing)
        or _noise_fault(noise)
        or _order_fault(case)
        or _prompt_fault(levels)
        or _answer_fault(pay)
        or _regraded_fault(add_regraded_pay(case.recent_records))
        or _empty_fault(count_empty_pay(case))
    )
    if fault:
        return failed_finding(fault, **figures)
    is_answered = pay.prompts >= MIN_ANSWERED
    if noise.repeats < MIN_REPEATS and "regrade" not in case.probe_results and not is_answered:
        return no_data_finding(
            f"{noise.repeats} completions repeat another of their prompt (of {MIN_REPEATS}), "
            f"{pay.prompts} prompts have completions with the dataset's answer (of "
            f"{MIN_ANSWERED}), and no regrade probe"
        )
    return passed_finding(
        f"{missing:.0%} of the rewards are missing (limit {MAX_MISSING_FRACTION:.0%}), and "
        f"{noise.fraction:.0%} of their variance is between equal completions (limit "
        f"{MAX_NOISE_FRACTION:.0%})",
        **figures,
    )


def _step_fault(case: Case, missing: float) -> str:
    """Return the fault that this step shows alone."""
    columns = {"reward": case.record.reward, **case.record.reward_parts}
    for name, values in columns.items():
        num = 0 if values is None else int(np.isinf(values).sum())
        if num:
            return f"{num} of {case.record.num_rows} values of `{name}` are infinite (limit 0)"
    logged = case.metrics.get(case.record.step, {}).get("reward")
    if logged is not None and math.isinf(float(logged)):
        return f"the mean reward was logged as {float(logged)} (limit: finite)"
    if missing > MAX_MISSING_FRACTION:
        return f"{missing:.0%} of the rewards are missing (limit {MAX_MISSING_FRACTION:.0%})"
    regrade = case.probe_results.get("regrade")
    return "" if regrade is None else _regrade_fault(regrade, at_start=case.learner_version == 0)


def _noise_fault(noise: RewardNoise) -> str:
    is_occasional = noise.deviating <= MAX_MISSING_FRACTION  # as of rewards that are missing
    if is_occasional or noise.repeats < MIN_REPEATS or noise.lower_bound <= MAX_NOISE_FRACTION:
        return ""
    return (
        f"{noise.fraction:.0%} +- {noise.error:.0%} of the variance of the rewards is between "
        f"equal completions of one prompt (limit {MAX_NOISE_FRACTION:.0%} by {NUM_ERRORS:g} "
        f"standard errors), and {noise.deviating:.0%} of {noise.repeats} repeated completions "
        f"have another reward than their equals (limit {MAX_MISSING_FRACTION:.0%})"
    )


def _order_fault(case: Case) -> str:
    order = find_reward_order(case)
    return f"rewards belong to other completions: {order}" if order else ""


def _prompt_fault(levels: PromptLevels) -> str:
    if levels.num < MIN_PROMPTS or levels.num_mixed or levels.num_others < MIN_OTHERS * levels.num:
        return ""
    return (
        f"none of {levels.num} prompts with different completions has two different rewards "
        f"(limit 1 of {MIN_PROMPTS}), and {levels.num_others} have another one than most: the "
        "reward depends on the prompt alone"
    )


def _answer_fault(pay: AnswerPay) -> str:
    if pay.prompts < MIN_ANSWERED or pay.paid_more:
        return ""
    return (
        f"of {pay.prompts} prompts, completions that state the dataset's answer are paid more "
        f"than the others in none (limit 1 of {MIN_ANSWERED}), and less in {pay.paid_less}"
    )


def _regraded_fault(pay: RegradedPay) -> str:
    if pay.right >= MIN_RIGHT and pay.wrong >= MIN_RIGHT and not pay.right_paid:
        return (
            f"none of {pay.right} completions with the dataset's answer gets more than the least "
            f"paid of {pay.wrong} with another number (limit 1 of {MIN_RIGHT})"
        )
    mixed = pay.prompts - pay.prompts_paid - pay.prompts_unpaid
    is_of_prompt = mixed <= MAX_MIXED_FRACTION * pay.prompts and pay.prompts_paid >= MIN_ALIKE
    if is_of_prompt and pay.prompts_unpaid > max(MIN_ALIKE, MIN_UNPAID_FRACTION * pay.prompts):
        return (
            f"in {pay.prompts_unpaid} of {pay.prompts} prompts no completion with the dataset's "
            f"answer is paid, and in {pay.prompts_paid} all are (limit {MIN_UNPAID_FRACTION:.0%}): "
            "the answers of some prompts are not recognised"
        )
    compared = pay.told_apart + pay.all_paid
    if min(pay.told_apart, pay.all_paid) >= MIN_ALIKE and (
        pay.all_paid > MIN_ALIKE_FRACTION * compared
    ):
        return (
            f"in {pay.all_paid} prompts different wrong answers all get the highest reward, and "
            f"in {pay.told_apart} the dataset's answer alone (limit {MIN_ALIKE_FRACTION:.0%}): a "
            "function pays what it cannot grade"
        )
    return ""


def _empty_fault(pay: EmptyPay | None) -> str:
    if pay is None or pay.empty < MIN_EMPTY or pay.prompts < MIN_ALIKE or not pay.others:
        return ""
    is_paid = pay.empty_best >= MIN_EMPTY_BEST * pay.empty
    if not is_paid or pay.others_best > MAX_OTHERS_BEST * pay.others:
        return ""
    return (
        f"{pay.empty_best} of {pay.empty} completions without a token before the end get the "
        f"highest reward, and {pay.others_best} of {pay.others} others (limit "
        f"{MIN_EMPTY_BEST:.0%}): an empty answer counts as right"
    )


def _regrade_fault(regrade: ProbeEntry, *, at_start: bool) -> str:
    same, gold, wrong = (regrade.get(k) for k in ("same", "right_answers", "wrong_completions"))
    if same is not None and same < MIN_SAME_FRACTION:
        return (
            f"graded again in another order, {same:.0%} get the "
            f"same reward (limit {MIN_SAME_FRACTION:.0%})"
        )
    # after updates, wrong completions may get more because the reward is exploited
    if at_start and gold is not None and wrong is not None and gold <= wrong:
        return f"right answers get {gold:.3g}, wrong completions {wrong:.3g}: not more"
    return ""


CHECK = Check(
    name="broken-reward",
    description="rewards are missing, wrong, or in another order than the completions",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Grade some correct answers by hand, compare whole stripped texts (an empty one is a part "
    "of every answer), return rewards in the order of the completions, None for a completion "
    "without a reward, and cache by prompt and completion.",
    judge=judge_case,
    explains=("equal-rewards", "reward-hacking", "step-too-big", "cliff-rewards"),
    reads=(
        "record.reward_parts",
        "record.group",
        "record.token_ids",
        "run.eos_ids",
        "facts.answer_prompts",
        "facts.answer_paid_more",
        "facts.answer_paid_less",
        *(f"facts.regraded_{name}" for name in RegradedPay.__dataclass_fields__),
        "metrics.reward",
        "probes.regrade",
    ),
)
