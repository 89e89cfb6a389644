"""The arithmetic task."""

from klinic.tasks.arithmetic.rewards import binary, graduated, parse
from klinic.tasks.arithmetic.rows import eval_rows, train_rows, warm_start_rows
from klinic.tasks.arithmetic.skills import SKILLS
from klinic.tasks.base import Task

TASK = Task(
    name="arithmetic",
    skills=tuple(SKILLS),
    default_skill="addition",
    train_rows=train_rows,
    eval_rows=eval_rows,
    warm_start_rows=warm_start_rows,
    rewards={"binary": binary, "graduated": graduated},
    default_reward="binary",
    parse=parse,
)
