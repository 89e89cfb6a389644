"""prompt-mismatch: the sampler gets the prompt without its first token.

Second mechanism: the sampler prepends a chat role to a plain prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.sampler.transformers import TransformersSampler

# samples; one in so many is affected
SHORTENED_SAMPLE_EVERY = {
    Severity.MILD: 8,
    Severity.NORMAL: 1,
}


@contextmanager
def drop_first_prompt_token(severity: Severity) -> Iterator[None]:
    """Drop the first token of the sampler's prompt."""

    def turn_without_first(real: Any, self: Any, rollout: Any, step: int) -> Any:
        turn = real(self, rollout, step)
        is_affected = rollout.sample % SHORTENED_SAMPLE_EVERY[severity] == 0
        return replace(turn, context=turn.context[1:]) if is_affected else turn

    with patch_attribute(TransformersSampler, "_next_turn", turn_without_first):
        yield


FAULT = Fault(
    cause="prompt-mismatch",
    mechanism="the sampler's prompt lacks its first token",
    inject=drop_first_prompt_token,
    visible_at_start=True,
)


ROLE_PREFIX = "user: "
ROLE_PROMPT_EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # prompts; one in so many is affected


@contextmanager
def prepend_chat_role(severity: Severity) -> Iterator[None]:
    """Prepend a role as a chat template does; the learner scores the original prompt."""

    def turn_with_role(real: Any, sampler: Any, rollout: Any, step: int) -> Any:
        turn = real(sampler, rollout, step)
        evaluation = sampler._params.temperature == 0
        if not evaluation and rollout.prompt.index % ROLE_PROMPT_EVERY[severity] == 0:
            role = np.array(sampler._policy.tokenizer.encode(ROLE_PREFIX), np.int64)
            turn = replace(turn, context=np.concatenate([role, turn.context]))
        return turn

    with patch_attribute(TransformersSampler, "_next_turn", turn_with_role):
        yield


SECOND_FAULT = Fault(
    cause="prompt-mismatch",
    mechanism="the sampler prepends a chat role to the prompt",
    inject=prepend_chat_role,
    visible_at_start=True,
)
