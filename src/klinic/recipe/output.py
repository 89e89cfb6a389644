"""The `output` section: run folder, records, metrics sinks and the live doctor."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from klinic.recipe.section import CountOrZero, Section, Text

LONGEST_PROJECT = 128
TrackerName = Literal["tensorboard", "wandb", "trackio"]

NOT_IN_PROJECT = r"/\#?%:"


def _check_project(value: str) -> str:
    if len(value) > LONGEST_PROJECT or any(char in value for char in NOT_IN_PROJECT):
        raise ValueError(
            f"W&B refuses it. Use at most {LONGEST_PROJECT} characters, and none of "
            f"{' '.join(NOT_IN_PROJECT)}"
        )
    return value


Project = Annotated[Text, AfterValidator(_check_project)]


class OutputSection(Section):
    """Run folder, metrics sinks, records and doctor."""

    dir: Text | None = None
    """Run folder; null: `runs/` and the name of the recipe file or of the model."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ("tensorboard",)
    """Metrics sinks in addition to the console: any of `tensorboard`, `wandb`, `trackio`."""
    project: Project = "klinic"
    """Project name in W&B and trackio; the run is named after its folder."""
    records_every: CountOrZero = 1
    """Steps between per-token step records; 0: none."""
    doctor: Literal["tell", "stop", "none"] = "tell"
    """Test every step for known causes: `tell` prints a finding, `stop` ends the run, or `none`."""
