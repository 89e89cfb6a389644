"""Hypotheses about an exploding KL, by their numbers; `klinic explain H03` prints one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A hypothesis about an exploding KL, with what speaks against it."""

    title: str
    priority: str
    invalidated_by: tuple[str, ...]


HYPOTHESES = {
    "H01": Hypothesis(
        title="Advantage scaling",
        priority="high: test it before H03, which it hides",
        invalidated_by=(
            "The largest advantage stays the same with learner.advantage: leave_one_out.",
            "advantage-explodes and wrong-groups are ruled out.",
        ),
    ),
    "H02": Hypothesis(
        title="Token masks",
        priority="high",
        invalidated_by=("wrong-loss-mask and stop-token-fault are ruled out.",),
    ),
    "H03": Hypothesis(
        title="KL formula",
        priority="high, after H01",
        invalidated_by=(
            "The run fails in the same way with kl.coef=0.",
            "The logged KL is positive and of a plausible size.",
            "The formula is that of other libraries: klinic verify FILE.py:FUNCTION.",
            "A corrected formula does not improve training: klinic diagnose RUN --prove.",
        ),
    ),
    "H04": Hypothesis(
        title="Context truncation",
        priority="medium",
        invalidated_by=("context-truncated is ruled out.",),
    ),
    "H06": Hypothesis(
        title="Weight synchronisation, also of LoRA adapters",
        priority="high",
        invalidated_by=(
            "stale-sampler is ruled out.",
            "The same run without an adapter (model.lora_rank=null) fails in the same way.",
        ),
    ),
}
