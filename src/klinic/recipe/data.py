"""The `data` section: the source of prompts."""

from pydantic import model_validator

from klinic.recipe.section import Section, Text


class DataSection(Section):
    """A built-in task or a user's dataset."""

    task: Text | None = None
    """A built-in task, such as `arithmetic`, with prompts, rewards and held-out questions."""
    skill: Text | None = None
    """The skill of the task to train; null: the task's default."""
    path: Text | None = None
    """A JSONL, JSON, CSV or Parquet file, or a folder or hub id as `name,config,split`."""
    map: Text | None = None
    """`file.py:function` that maps a row to one with a `prompt`; null if rows have one."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        if (self.task is None) == (self.path is None):
            found = "neither data.task nor data.path is" if self.task is None else "both are"
            raise ValueError(
                f"data needs exactly one source of prompts, and {found} set. Set data.task "
                "(`arithmetic` is built in) or data.path (a file or a hub id), not both."
            )
        name = "skill" if self.path else "map"
        if getattr(self, name) is not None:
            raise ValueError(
                f"data.{name} does not apply to data.{'path' if self.path else 'task'}: skills "
                f"belong to tasks, map functions to datasets. Remove data.{name}."
            )
        return self
