"""Hidden states of frozen models, reference and teacher, per micro-batch of a step."""

from dataclasses import replace

from klinic.evidence.record import StepRecord
from klinic.learner.objective import needs_whole_vocabulary
from klinic.learner.packing import MicroBatch
from klinic.learner.step_results import first_of_groups
from klinic.model.reference import Reference
from klinic.model.scorer import RefHidden


def hidden_states(frozen: Reference | None, batches: list[MicroBatch]) -> list[RefHidden | None]:
    """Return the hidden states of a frozen model per micro-batch; None without one."""
    return [None if frozen is None else frozen.hidden(batch.layout) for batch in batches]


def sampled_states(
    record: StepRecord, batches: list[MicroBatch], hidden: list[RefHidden | None]
) -> list[RefHidden | None]:
    """Return the hidden states of the first completion of each group."""
    return [first_of_groups(record, b, h) for b, h in zip(batches, hidden, strict=True)]


def states_for_update(
    frozen: Reference | None, hidden: RefHidden | None, batch: MicroBatch, estimator: str | None
) -> RefHidden | None:
    """Return the hidden states of a frozen model that the KL term of an update needs."""
    has_top = hidden is not None and hidden.top is not None
    if frozen is None or has_top or not needs_whole_vocabulary(estimator):
        return hidden
    states = hidden
    if states is None or states.tokens is not None:
        states = frozen.hidden(batch.layout)
    return replace(states, topk=estimator == "topk")
