"""broken-sampler: equal random streams, token ids outside the vocabulary, or NaN in the engine."""

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.copied_samples import find_copies
from klinic.checks.equal_samples import find_twin_samples, largest_row_logp
from klinic.checks.measures import equal_completions, num_equal_pairs, row_numbers
from klinic.checks.repeated_draws import find_repeated_draws
from klinic.evidence.record import EmittedBy, StepRecord

MIN_DEVIATIONS = 6.0  # standard deviations of the number of equal completions
MIN_EXCESS_PAIRS = 8.0  # pairs above the expectation: chance pairs of short answers are no fault


def judge_case(case: Case) -> Finding:
    """Flag completions that a working sampler cannot have sampled.

    Looks for
        The number of equal completions of one prompt, against the number expected from their
        log-probs; two samples, such as the second and the fourth, that are equal in every group
        of the recent steps; token ids outside the vocabulary; non-finite log-probs of tokens
        that the policy sampled. Prompts that come again in later steps: whether the completion
        of a place in the group is that of the same place before more often than of another.
        Without log-probs, as in texts: copies that no policy explains.
    Why it matters
        Engines that start from one seed give every member of a group the same completion: all
        rewards are equal, and nothing is learned though entropy is high.
    Confirmed when
        There are more equal pairs than expected by six standard deviations and by eight pairs;
        or two samples are equal in every group, which has a probability below e^-20;
        or a single id is outside the vocabulary; or the engine lost the log-prob of a sampled
        token; or completions of later weights repeat those of their place by six standard
        deviations and eight rows more than those of other places. Without log-probs: two prompts
        have the same three different completions; or nearly all of eight groups are one long
        completion each, from the first step on or where an equal prompt has another; or two
        places are equal in every group by a chance below e^-20.
    Ruled out when
        The number of equal completions matches chance, ids are in the vocabulary, and log-probs
        are finite.
    Confused with
        equal-rewards (completions differ, rewards do not); hidden-sampling-transform (tokens
        are likelier than they should be, and need not be equal).
    """
    record = case.record
    if not record.num_tokens:
        return no_data_finding("no tokens were recorded")
    outside = int((record.token_ids >= int(case.run["vocabulary_size"])).sum())
    outside += int((record.token_ids < 0).sum())
    lost = _num_lost_logps(record)
    pairs = num_equal_pairs(case.measure_once(equal_completions, record))
    expected, spread = expected_equal_pairs(record)
    limit = expected + max(MIN_DEVIATIONS * spread, MIN_EXCESS_PAIRS)
    summary = (
        f"{pairs} pairs of equal completions, {expected:.1f} expected (limit {limit:.0f}); "
        f"{outside} ids outside the vocabulary and {lost} lost log-probs (limit 0)"
    )
    wrong = pairs > limit or outside > 0 or lost > 0
    figures = {"pairs": float(pairs), "expected": expected, "outside": float(outside)}
    if (twins := find_twin_samples(case)) is not None:
        return failed_finding(
            f"samples {twins.pair[0]} and {twins.pair[1]} are equal in all {twins.num_groups} "
            f"groups of the recent steps, which has a probability of e^{twins.log_chance:.0f}: "
            "they share a random stream",
            **figures,
        )
    if not wrong and (repeated := _repeated_draws(case)) is not None:
        return repeated
    return (failed_finding if wrong else passed_finding)(summary, **figures, lost=float(lost))


def confirm_copies(case: Case) -> Finding | None:
    """Confirm the cause from completions alone."""
    copies = find_copies(case)
    return failed_finding(copies) if copies else _repeated_draws(case)


def _repeated_draws(case: Case) -> Finding | None:
    found = find_repeated_draws(case)
    if found is None:
        return None
    return failed_finding(
        f"of {found.rows} completions whose prompt came in the step before, {found.equal:.0f} are "
        f"those that their place in the group had there, {found.expected:.0f} by chance (limit "
        f"{found.limit:.0f}): later steps draw the same random numbers",
        repeated=found.equal,
        expected_repeated=found.expected,
    )


def _num_lost_logps(record: StepRecord) -> int:
    """Count the policy's tokens without a log-prob, if other tokens have one."""
    logp = record.logp_sampler
    if logp is None or record.emitted_by is None or not np.isfinite(logp).any():
        return 0
    lost = ~np.isfinite(logp) & (record.emitted_by == EmittedBy.POLICY)
    if record.round_trip is not None:  # ids that replace sampled ones have no log-prob
        lost &= record.round_trip[row_numbers(record)]
    return int(lost.sum())


def expected_equal_pairs(record: StepRecord) -> tuple[float, float]:
    """Return the expected number of equal pairs within groups, and its standard deviation.

    The probability that a second completion equals this one is the probability of this one, by
    the side that gives it more: a learner that scores other tokens gives it almost none. Tokens
    that a tool or a template inserts are no choice of the sampler.
    """
    sums = largest_row_logp(record)
    probabilities = np.exp(np.minimum(sums, 0.0))
    sizes = np.bincount(record.group)[record.group]
    chances = probabilities * (sizes - 1) / 2
    # upper bound for dependent pairs: each member counts with its whole group
    variance = float(np.sum(chances * np.maximum(sizes - 1, 1)))
    return float(chances.sum()), float(np.sqrt(variance))


CHECK = Check(
    name="broken-sampler",
    description="equal random streams, token ids outside the vocabulary, or NaN in the engine",
    stage=Stage.ALIGNMENT,
    needs=("record.logp_old", "run.vocabulary_size"),
    fix="Sample, not greedily (do_sample on, temperature above 0), and give every completion its "
    "own seed (of run, step, prompt and sample), set once and not in every step; restrict ids to "
    "the vocabulary, and treat a missing log-prob as an error.",
    judge=judge_case,
    confirm=confirm_copies,
    explains=("equal-rewards", "imprecise-logp", "unexplained-gap"),
    reads=(
        "record.token_ids",
        "record.row_offsets",
        "record.group",
        "record.sample",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.entropy",
        "record.logp_sampler",
        "record.emitted_by",
        "record.round_trip",
        "record.weight_version",
        "record.reward",
    ),
    not_recorded="the engine's own random state: equal completions of high entropy show it",
)
