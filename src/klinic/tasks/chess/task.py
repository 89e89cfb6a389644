"""The chess task."""

from klinic.tasks.base import Task
from klinic.tasks.chess import rewards
from klinic.tasks.chess.rows import ROW_MAKERS, eval_rows, train_rows, warm_start_rows

TASK = Task(
    name="chess",
    skills=tuple(ROW_MAKERS),
    default_skill="policy",
    train_rows=train_rows,
    eval_rows=eval_rows,
    warm_start_rows=warm_start_rows,
    rewards={
        "structure": rewards.structure,
        "parses": rewards.parses,
        "legality": rewards.legality,
        "agreement": rewards.agreement,
        "parsed": rewards.parsed,
        "legal": rewards.legal,
    },
    default_reward="agreement",
    parse=rewards.parse,
    measures=("structure", "parses", "legality", "agreement", "parsed", "legal"),
)
