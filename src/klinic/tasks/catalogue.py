"""The built-in tasks by name, imported on demand."""

from importlib import import_module

from klinic.errors import MissingExtraError
from klinic.tasks.base import Task, look_up

EXTRAS = {"arithmetic": None, "chess": "chess", "multihop": None, "sums": None}
"""Each task with the optional dependency group (extra) it needs."""


def find_task(name: str) -> Task:
    """Return the task of this name.

    >>> find_task("arithmetic").default_skill
    'addition'
    """
    extra = look_up("task", name, EXTRAS)
    try:
        task: Task = import_module(f"klinic.tasks.{name}.task").TASK
    except ModuleNotFoundError as error:
        if extra is None:
            raise
        raise MissingExtraError(
            f'the task {name} needs {error.name}. Install it with: pip install "klinic[{extra}]"'
        ) from error
    return task
