"""The `data` section: where prompts come from."""

from pydantic import model_validator

from klinic.recipe.section import Section, Text


class DataSection(Section):
    """A built-in task, or a dataset of your own."""

    task: Text | None = None
    """A built-in task, such as `arithmetic`: prompts, rewards and held-out questions."""
    skill: Text | None = None
    """The skill of the task to train; null is the task's default."""
    path: Text | None = None
    """A `.jsonl`, `.json`, `.csv` or `.parquet` file, or a hub id; needs a `prompt` column."""
    split: Text = "train"
    """Which split of the dataset to train on, such as `train[:100]`."""
    eval_path: Text | None = None
    """Held-out prompts, in the same form as `path`."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        if (self.task is None) == (self.path is None):
            found = "neither data.task nor data.path is" if self.task is None else "both are"
            raise ValueError(
                f"data has one source of prompts, and {found} set. Set data.task (`arithmetic` is "
                "built in) or data.path (a file or a hub id), not both."
            )
        for name in ("skill",) if self.path else ("eval_path",):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"data.{name} does not go with data.{'path' if self.path else 'task'}: a task "
                    f"has skills and holds out its own questions, a file has neither. Leave "
                    f"data.{name} out."
                )
        return self
