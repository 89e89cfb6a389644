"""Tests the device of a learner: `klinic check --device`.

Each result has a verdict and one line. The tests of updates change the weights: `try_updates`
restores them from the checkpoint that it tests, in a temporary folder.
"""

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.learner.diagnostics import is_diagnostic_step
from klinic.learner.local import LocalLearner
from klinic.learner.packing import MicroBatch
from klinic.learner.protocol import LossScales
from klinic.model.weights import trainable_tensors
from klinic.replay.check_report import ComponentResult
from klinic.replay.device_check import LOGP_LIMITS
from klinic.replay.host_waits import HostWaits

MAX_OWN_WAITS = 6  # of klinic's lines, in a step of one update, without sampling
TOO_LOW = 1.1  # measured memory, relative to a prediction that is reported as too low
NUM_UPDATES = 2  # after the save, with and without a resume
CHECKPOINT_BYTES = 12  # per trained weight: fp32 weight and two moments
OFTEN = 3  # lines that a result names


def record_with_signal(record: StepRecord) -> StepRecord:
    """Return the record with advantages of 1 and -1 where all are 0, so that it has a gradient."""
    if record.advantage is not None and np.nan_to_num(record.advantage).any():
        return record
    rows = np.arange(record.num_rows)
    return replace(record, advantage=np.where(rows % 2 == 0, 1.0, -1.0))


def check_sampler_gap(metrics: dict[str, float], *, dtype: str) -> ComponentResult:
    """Compare the log-probs of the sampler with those of the learner, both on the device."""
    gap, limit = metrics.get("sampling/sampling_logp_difference/mean"), LOGP_LIMITS[dtype]
    if gap is None:
        return ComponentResult(
            name="sampler gap", ok=True, detail="not measured: no sampler log-probs here"
        )
    detail = f"sampler and learner differ by {gap:.1e} nats a token (limit {limit:g})"
    return ComponentResult(name="sampler gap", ok=gap <= limit, detail=detail)


def check_host_waits(
    learner: LocalLearner, record: StepRecord, *, kl_coef: float
) -> ComponentResult:
    """Count the waits of one update for the device; its weights must be restored afterwards."""
    if learner.scorer.device.type == "cpu":
        return ComponentResult(name="host waits", ok=True, detail="none: this is the CPU")
    # every diagnostic pass reads more
    step = next(step for step in itertools.count(2) if not is_diagnostic_step(step))
    with HostWaits() as waits:
        learner.all_finite()  # as at the start and the end of a step
        batches = _update(learner, replace(record, step=step), kl_coef=kl_coef)
        learner.all_finite()
    limit = MAX_OWN_WAITS + _waits_for_filters(learner, batches)
    own, of_libraries = waits.own.total(), waits.of_libraries.total()
    detail = (
        f"{own} in klinic (limit {limit}), {of_libraries} in libraries, "
        f"{waits.uploads.total()} copies to the device, in a step of {len(batches)} "
        "micro-batches"
    )
    if own > limit:
        lines = (f"{line} ({num} times)" for line, num in waits.own.most_common(OFTEN))
        detail += f"; most at {', '.join(lines)}"
    return ComponentResult(name="host waits", ok=own <= limit, detail=detail)


def _waits_for_filters(learner: LocalLearner, batches: list[MicroBatch]) -> int:
    """Return the waits for the numbers of tokens that top-k, top-p or min-p keep."""
    if not learner.settings.filters.has_filters:
        return 0
    return sum(1 + len(learner.scorer.token_chunks(len(b.tokens))) for b in batches)


def try_updates(
    learner: LocalLearner, record: StepRecord, *, kl_coef: float, folder: Path
) -> list[ComponentResult]:
    """Test host waits and checkpoints on a batch; the weights are restored.

    The learner has made an update, so that its optimizer has moments to save.
    """
    if needed := missing_disk_space(learner, folder.parent):
        detail = f"not tested: {needed / 2**30:.1f} GB are needed in the temporary folder"
        names = ("host waits", "save and resume")
        return [ComponentResult(name=name, ok=True, detail=detail) for name in names]
    checkpoint = SavedLearner(learner, folder)
    resumed = check_resume(learner, record, checkpoint, kl_coef=kl_coef)
    waits = check_host_waits(learner, record, kl_coef=kl_coef)
    checkpoint.restore()
    return [waits, resumed]


class SavedLearner:
    """A checkpoint of a learner in a temporary folder."""

    def __init__(self, learner: LocalLearner, folder: Path) -> None:
        folder.mkdir()
        self._learner, self._folder = learner, folder
        self._state = learner.save(folder)

    def restore(self) -> None:
        """Load the checkpoint, as a resumed run does."""
        self._learner.load(self._folder, self._state)


def check_resume(
    learner: LocalLearner, record: StepRecord, checkpoint: SavedLearner, *, kl_coef: float
) -> ComponentResult:
    """Compare two updates after saving with the same two updates after loading."""
    trained = trainable_tensors(learner.policy.lm)
    started = _host_copies(trained.values())
    went_on = _weights_after_updates(learner, record, kl_coef=kl_coef)
    checkpoint.restore()
    resumed = _weights_after_updates(learner, record, kl_coef=kl_coef)
    moved = sum(not torch.equal(a, b) for a, b in zip(started, went_on, strict=True))
    differ = [
        name for name, a, b in zip(trained, went_on, resumed, strict=True) if not torch.equal(a, b)
    ]
    detail = f"{NUM_UPDATES} updates after a save and after a resume are equal bit by bit"
    if differ:
        detail = (
            f"{len(differ)} of {len(trained)} tensors differ after {NUM_UPDATES} updates with and "
            f"without a resume; the first is {differ[0]}"
        )
    elif not moved:
        detail = f"{NUM_UPDATES} updates changed no weight"
    return ComponentResult(name="save and resume", ok=not differ and moved > 0, detail=detail)


def missing_disk_space(learner: LocalLearner, folder: Path) -> int | None:
    """Return the bytes of a checkpoint if the folder's disk cannot hold it."""
    trained = trainable_tensors(learner.policy.lm)
    needed = CHECKPOINT_BYTES * sum(p.numel() for p in trained.values())
    return needed if needed > shutil.disk_usage(folder).free else None


def _weights_after_updates(
    learner: LocalLearner, record: StepRecord, *, kl_coef: float
) -> list[Tensor]:
    for _ in range(NUM_UPDATES):
        _update(learner, record, kl_coef=kl_coef)
    return _host_copies(trainable_tensors(learner.policy.lm).values())


def _host_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _update(learner: LocalLearner, record: StepRecord, *, kl_coef: float) -> list[MicroBatch]:
    """Score a batch and apply one update; return its micro-batches."""
    with_kl = kl_coef > 0 and learner.reference is not None
    scored = learner.score(record, needs_reference=with_kl)
    learner.prepare(scored, LossScales(kl_coef=kl_coef if with_kl else 0.0))
    learner.commit()
    return scored.batches


class PeakMemory:
    """The highest peak of allocated device memory in some parts of a run."""

    def __init__(self, device: torch.device) -> None:
        module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._device = device
        self._reset: Callable[..., None] | None = getattr(module, "reset_peak_memory_stats", None)
        self._read: Callable[..., int] | None = getattr(module, "max_memory_allocated", None)
        self.num_bytes: int | None = None
        """None where torch does not measure it."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak of a block of code."""
        if self._reset is None or self._read is None:
            yield
            return
        self._reset(self._device)
        yield
        self.num_bytes = max(self.num_bytes or 0, int(self._read(self._device)))


def describe_memory(peak: int | None, predicted: int | None) -> ComponentResult:
    """Compare the measured peak with the predicted one; a difference never fails the test.

    The prediction is for completions of the maximum length, so the peak is usually lower.
    """
    measured = "not measured on this device" if peak is None else f"{_megabytes(peak)} measured"
    forecast = "no prediction" if predicted is None else f"{_megabytes(predicted)} predicted"
    note = ""
    if peak is not None and predicted is not None and peak > TOO_LOW * predicted:
        note = "; the prediction is too low, please report it"
    return ComponentResult(name="peak memory", ok=True, detail=f"{measured}, {forecast}{note}")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MB"
