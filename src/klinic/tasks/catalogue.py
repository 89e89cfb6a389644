"""The tasks klinic brings along, by name."""

from klinic.tasks.arithmetic.task import TASK as ARITHMETIC
from klinic.tasks.base import Task, choose

TASKS = {task.name: task for task in (ARITHMETIC,)}


def find(name: str) -> Task:
    """Return the task of this name.

    >>> find("arithmetic").default_skill
    'addition'
    """
    return choose("task", name, TASKS)
