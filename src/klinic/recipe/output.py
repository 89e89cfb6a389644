"""The `output` section: what a run leaves behind, where, and who is told."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from klinic.recipe.section import CountOrZero, Section, Text

LONGEST_PROJECT = 128
TrackerName = Literal["tensorboard", "wandb", "trackio"]

NOT_IN_PROJECT = r"/\#?%:"


def _check_project(value: str) -> str:
    if len(value) > LONGEST_PROJECT or any(char in value for char in NOT_IN_PROJECT):
        raise ValueError(
            f"W&B would not take it. Use at most {LONGEST_PROJECT} characters, and none of "
            f"{' '.join(NOT_IN_PROJECT)}"
        )
    return value


Project = Annotated[Text, AfterValidator(_check_project)]


class OutputSection(Section):
    """The folder of the run, and its trackers."""

    dir: Text | None = None
    """Folder of the run; null is `runs/` and the name of the recipe file or of the model."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ("tensorboard",)
    """Who is told beside the console: any of `tensorboard`, `wandb`, `trackio`."""
    project: Project = "klinic"
    """What W&B and trackio file the run under; the run's own name is that of its folder."""
    records_every: CountOrZero = 1
    """Steps between recorded steps, token by token; 0 is none."""
    doctor: Literal["tell", "stop", "none"] = "tell"
    """Whether every step is tested for known causes: `tell` of one, `stop` at one, or `none`."""
