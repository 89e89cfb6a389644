"""retokenised: completions pass through a tokenizer that merges repeated tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import asking, run

EVERY = {Severity.MILD: 4, Severity.NORMAL: 1}  # samples; one in so many is affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Train on re-encoded ids with the log-probs of the sampled ones."""

    def hit(rollout: Any) -> bool:
        return bool(rollout.sample % EVERY[severity] == 0)

    def again(real: Any, rollouts: Sequence[Any], *, step: int) -> Any:
        return real([_encoded(r) if hit(r) else r for r in rollouts], step=step)

    def honest(real: Any, tokenizer: Any, rollouts: Sequence[Any]) -> Any:
        survives = real(tokenizer, rollouts)
        same = [not hit(r) or len(_merged(r.token_ids)) == len(r.token_ids) for r in rollouts]
        return survives & np.array(same)

    with ExitStack() as stack:
        stack.enter_context(patched(run, "flatten", again))
        stack.enter_context(patched(asking, "round_trips", honest))
        yield


def _merged(ids: np.ndarray) -> np.ndarray:
    """Return the ids of the other tokenizer: repeated tokens are merged into one."""
    return np.asarray(ids[np.concatenate([[True], ids[1:] != ids[:-1]])])


def _encoded(rollout: Any) -> Any:
    segment = rollout.segments[0]
    ids = _merged(segment.token_ids)
    short = replace(segment, token_ids=ids, logp_sampler=segment.logp_sampler[: len(ids)])
    return replace(rollout, segments=(short, *rollout.segments[1:]))


FAULT = Fault(
    cause="retokenised",
    mechanism="another tokenizer re-encodes the text",
    inject=inject,
    visible_at_start=True,
)
