"""The assembled parts of a run: recipe, folder, data, policy, learner, sampler and trackers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klinic.data.prompts import PromptDataset
from klinic.evidence.run_facts import display_path
from klinic.learner.protocol import Learner
from klinic.model.loading import Policy
from klinic.model.reference import ReferenceIdentity
from klinic.model.start_digests import StartDigests
from klinic.recipe.recipe import Recipe
from klinic.sampler.protocol import Sampler
from klinic.trackers.protocol import Tracker
from klinic.training.source import TaskData

if TYPE_CHECKING:
    from klinic.training.ray_run import RayWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts that a recipe was assembled into; none of them is replaced during a run."""

    recipe: Recipe
    folder: Path
    task_data: TaskData
    policy: Policy
    learner: Learner
    sampler: Sampler
    prompt_dataset: PromptDataset
    trackers: list[Tracker]
    reference: ReferenceIdentity
    """The reference at the start; the learner has its current state."""
    teacher: ReferenceIdentity
    """The teacher; kind "none" without one."""
    digests: StartDigests
    """Digests of the policy at the start: of all its weights, and of the base under an adapter."""
    cluster: "RayWorkers | None" = None
    """Worker processes, if there are any."""

    @property
    def display_folder(self) -> Path:
        """The run folder as messages name it."""
        return display_path(self.folder, self.recipe)
