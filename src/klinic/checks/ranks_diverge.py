"""ranks-diverge: processes of the learner hold different weights."""

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
from klinic.checks.measures import column_difference, finite_trained_tokens, rms, row_numbers
from klinic.evidence.record import StepRecord

MIN_GAP = 2e-3  # nats: fp32 engines differ by 1e-6, a typical update by more than this
MIN_RATIO = 5.0  # times the gap of the best process: kernels differ by less
MIN_TOKENS = 50  # tokens of each process


def judge_case(case: Case) -> Finding:
    """Flag processes whose weights differ after an update.

    Looks for
        Fingerprints of the weights of all processes; and, where the rows of a step name their
        process, the gap between sampler and learner of each: a sampler with the weights of one
        process agrees with that one alone.
    Why it matters
        If gradients are not summed over the processes, each trains a policy of its own on a
        part of the batch. One of them is sampled from and saved; the others are wasted, and
        their importance ratios drift.
    Confirmed when
        Fingerprints differ; or, after an update, the rows of a process are above 0.002 nats from
        the sampler and five times as far as those of another process, and in the first step they
        were not.
    Ruled out when
        Fingerprints agree, or all processes are equally near to the sampler.
    Confused with
        stale-sampler (all processes are far from the sampler); loss-scaled-wrong (the weights
        agree, and the tokens of a process count more).
    """
    num_weights = case.record.facts.get("num_rank_weights")
    if num_weights is not None:
        return (failed_finding if int(num_weights) > 1 else passed_finding)(
            f"the processes hold {int(num_weights)} different weights (limit 1)",
            weights=float(num_weights),
        )
    if case.learner_version == 0 or case.start is None:
        return no_data_finding("before the first update the processes have loaded equal weights")
    now, start = (_process_gaps(record) for record in (case.record, case.start))
    if len(now) < 2 or now.keys() != start.keys():
        return no_data_finding(
            f"no two processes have {MIN_TOKENS} trained tokens with a log-prob of both sides"
        )
    ratio, ratio_at_start = (
        max(gaps.values()) / max(min(gaps.values()), 1e-9) for gaps in (now, start)
    )
    farthest = max(now, key=lambda process: now[process])
    is_fault = (
        now[farthest] > MIN_GAP and ratio > MIN_RATIO and ratio > MIN_RATIO / 2 * ratio_at_start
    )
    return (failed_finding if is_fault else passed_finding)(
        f"the rows of process {farthest} are {now[farthest]:.3g} nats from the sampler, "
        f"{ratio:.1f} times as far as those of the nearest process (limit {MIN_RATIO:g}); in the "
        f"first step it was {ratio_at_start:.1f}",
        gap=now[farthest],
        ratio=ratio,
    )


def _process_gaps(record: StepRecord) -> dict[int, float]:
    """Return the gap between sampler and learner by process, where enough tokens have one."""
    if record.process is None or record.logp_sampler is None or record.logp_old is None:
        return {}
    mask = finite_trained_tokens(record, "logp_sampler", "logp_old")
    gap = column_difference(record, "logp_sampler", "logp_old")
    process = np.asarray(record.process)[row_numbers(record)]
    parts = {int(rank): gap[mask & (process == rank)] for rank in np.unique(process)}
    return {rank: rms(part) for rank, part in parts.items() if part.size >= MIN_TOKENS}


CHECK = Check(
    name="ranks-diverge",
    description="processes of the learner hold different weights",
    stage=Stage.WIRING,
    needs=("record.process",),
    fix="Sum the gradients over all processes before every update (wrap the model in DDP or FSDP, "
    "run its own forward, finalise Megatron's gradients), and compare a hash of the weights of all "
    "processes now and then.",
    judge=judge_case,
    is_of_setup=True,
    explains=("stale-sampler", "unexplained-gap", "corrupted-sync"),
    reads=(
        "record.logp_sampler",
        "record.logp_old",
        "record.loss_mask",
        "facts.num_rank_weights",
        "facts.learner_version",
    ),
)
