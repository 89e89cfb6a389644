"""retokenised: completions pass through a tokenizer that merges repeated tokens.

Second mechanism: completions pass through text and a tokenizer that folds similar characters.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.model.tiny import tiny_tokenizer
from klinic.training import probes, run

MERGED_SAMPLE_EVERY = {Severity.MILD: 4, Severity.NORMAL: 1}  # samples; one in so many is affected


@contextmanager
def merge_repeated_tokens(severity: Severity) -> Iterator[None]:
    """Train on re-encoded ids with the log-probs of the sampled ones."""

    def is_affected(rollout: Any) -> bool:
        return bool(rollout.sample % MERGED_SAMPLE_EVERY[severity] == 0)

    def flatten_reencoded(real: Any, rollouts: Sequence[Any], *, step: int) -> Any:
        return real([_reencode_rollout(r) if is_affected(r) else r for r in rollouts], step=step)

    def round_trips_merged(real: Any, tokenizer: Any, rollouts: Sequence[Any]) -> Any:
        survives = real(tokenizer, rollouts)
        is_unchanged = [
            not is_affected(r) or len(_merge_repeats(r.token_ids)) == len(r.token_ids)
            for r in rollouts
        ]
        return survives & np.array(is_unchanged)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(run, "flatten_rollouts", flatten_reencoded))
        stack.enter_context(patch_attribute(probes, "check_round_trips", round_trips_merged))
        yield


def _merge_repeats(ids: np.ndarray) -> np.ndarray:
    """Return the ids of the other tokenizer: repeated tokens are merged into one."""
    return np.asarray(ids[np.concatenate([[True], ids[1:] != ids[:-1]])])


def _reencode_rollout(rollout: Any) -> Any:
    segment = rollout.segments[0]
    ids = _merge_repeats(segment.token_ids)
    short = replace(segment, token_ids=ids, logp_sampler=segment.logp_sampler[: len(ids)])
    return replace(rollout, segments=(short, *rollout.segments[1:]))


FAULT = Fault(
    cause="retokenised",
    mechanism="another tokenizer re-encodes the text",
    inject=merge_repeated_tokens,
    visible_at_start=True,
)


FOLDED_CHARACTERS = {"0": "o", "2": "z", "5": "s", "8": "b"}
FOLDED_ROW_EVERY = {Severity.MILD: 16, Severity.NORMAL: 1}  # rows; one in so many is re-encoded


@contextmanager
def fold_similar_characters(severity: Severity) -> Iterator[None]:
    """Decode, normalise and re-encode the sampled ids, and train on the result."""
    tokenizer = tiny_tokenizer()
    folding = str.maketrans(FOLDED_CHARACTERS)

    def reencode_segment(segment: Any) -> Any:
        text = tokenizer.decode(segment.token_ids.tolist()).translate(folding)
        return replace(segment, token_ids=np.array(tokenizer.encode(text), np.int64))

    def flatten_folded(real: Any, rollouts: Any, *, step: int) -> Any:
        encoded = list(rollouts)
        for row in range(0, len(encoded), FOLDED_ROW_EVERY[severity]):
            segments = tuple(map(reencode_segment, encoded[row].segments))
            encoded[row] = replace(encoded[row], segments=segments)
        return real(encoded, step=step)

    with patch_attribute(run, "flatten_rollouts", flatten_folded):
        yield


SECOND_FAULT = Fault(
    cause="retokenised",
    mechanism="decoded and encoded by a tokenizer that folds look-alike characters",
    inject=fold_similar_characters,
    visible_at_start=True,
)
