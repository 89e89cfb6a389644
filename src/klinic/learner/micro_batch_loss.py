"""The loss of a micro-batch as one number to differentiate, and the sums of its terms."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from klinic.learner.objective import LossTargets, LossTerms, Objective, loss_terms
from klinic.learner.update import read_numbers
from klinic.model.token_scores import TokenScores


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The loss of a slice of a micro-batch's tokens, called by the scorer."""

    targets: LossTargets
    objective: Objective
    to_scalar: Callable[[LossTerms], Tensor]

    def __call__(self, scores: TokenScores, tokens: slice) -> Tensor:
        """Return the loss of a slice of tokens."""
        return self.to_scalar(loss_terms(scores, self.targets.slice_tokens(tokens), self.objective))


def read_sums(terms_by_batch: list[LossTerms]) -> list[float]:
    """Return the sums of the terms and of the saturated tokens; the host waits once."""
    columns = [
        [terms.policy for terms in terms_by_batch],
        [terms.kl for terms in terms_by_batch if terms.kl is not None],
        [terms.teacher for terms in terms_by_batch if terms.teacher is not None],
        [terms.num_saturated for terms in terms_by_batch],
    ]
    read = iter(read_numbers([value for column in columns for value in column]))
    return [sum((next(read) for _ in column), 0.0) for column in columns]


def kl_sum(terms: LossTerms) -> Tensor:
    """Return the KL term of a micro-batch, alone."""
    return 0 * terms.policy if terms.kl is None else terms.kl


def teacher_sum(terms: LossTerms) -> Tensor:
    """Return the teacher term of a micro-batch, alone."""
    return 0 * terms.policy if terms.teacher is None else terms.teacher
