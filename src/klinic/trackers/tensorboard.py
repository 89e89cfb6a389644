"""Metrics in TensorBoard, under `train/` and `eval/`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.trackers.format import as_code_block, metric_tag


class TensorBoardTracker:
    """Writes TensorBoard scalars and purges steps that a rollback voids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, *, step: int) -> None:
        """Open the log; hide later steps of earlier logs in the folder."""
        purge = step + 1 if step else 0  # a new run evaluates at step 0
        self._writer = SummaryWriter(str(self._folder), purge_step=purge)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite metrics."""
        assert self._writer is not None  # noqa: S101 - begin comes first
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(metric_tag(name), value, step)

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Completions are in the records; TensorBoard has curves only."""

    def rewind(self, step: int) -> None:
        """Hide the data of later steps."""
        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log_message(self, step: int, message: str) -> None:
        """Write the message as text."""
        assert self._writer is not None  # noqa: S101 - begin comes first
        self._writer.add_text("events", as_code_block(message), step)

    def close(self) -> None:
        """Flush and close the writer."""
        if self._writer is not None:
            self._writer.close()
