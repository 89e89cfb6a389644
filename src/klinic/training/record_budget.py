"""Keeps the step records of a run within `output.keep_records`: the oldest are dropped.

Kept for ever are the first record, those that a failed check read when it first failed, and the
windows that the doctor needs at the newest step and at each checkpoint. A record that cannot be
read is kept as well. Dropped steps are listed in events.jsonl before they are removed.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from klinic.doctor.cases import WINDOW
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.dropped_records import DROPPED_EVENT, to_ranges
from klinic.recipe.record_budget import RecordBudget, parse_record_budget
from klinic.training import checkpoint

BATCH = 10  # a tenth of the budget is dropped at a time, so that events stay few
AppendEvent = Callable[[dict[str, object]], None]


class RecordKeeper:
    """Drops the oldest records of a run; does nothing without a budget."""

    def __init__(self, run: Path, setting: int | str | None, append_event: AppendEvent) -> None:
        self._run, self._append_event = run, append_event
        self._budget = None if setting is None else parse_record_budget(setting)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-dropping")
        self._pending: Future[list[int]] | None = None
        self._unreadable: set[int] = set()
        self._sizes: dict[int, int] = {}

    @property
    def has_budget(self) -> bool:
        """Whether the recipe limits the records."""
        return self._budget is not None

    def drop_old(self, step: int, evidence: Iterable[int]) -> None:
        """Drop the steps that were verified meanwhile, then look for others.

        `evidence` are the steps in which checks first failed, or causes were named.
        """
        if self._budget is None:
            return
        if self._pending is not None:
            if not self._pending.done():
                return
            self._remove(step, self._pending.result(), set(evidence))
        steps = store.complete_steps(self._run)
        protected = self._protected(steps, evidence)
        droppable = [s for s in steps if s not in protected and s not in self._unreadable]
        chosen = self._choose(steps, droppable, self._budget)
        self._pending = self._pool.submit(self._verify, chosen) if chosen else None

    def forget(self) -> None:
        """Forget the steps that were to be dropped: the run rolls back."""
        if self._pending is not None:
            self._pending.cancel()
        self._pending = None
        self._sizes.clear()

    def close(self) -> None:
        """Stop dropping."""
        self._pool.shutdown(wait=True)

    def _choose(
        self, steps: Sequence[int], droppable: Sequence[int], budget: RecordBudget
    ) -> list[int]:
        """Return the oldest steps that exceed the budget, and a tenth of it more."""
        if budget.steps is not None:
            batch = max(1, budget.steps // BATCH)
            excess = len(steps) - budget.steps
            few = len(droppable) < batch
            return [] if excess <= 0 or few else list(droppable[: excess + batch - 1])
        assert budget.num_bytes is not None  # noqa: S101 - one of the two is set
        sizes = self._measure(steps)
        total = sum(sizes.values())
        if total <= budget.num_bytes or len(droppable) * BATCH < len(steps):
            return []
        chosen = []
        for step in droppable:
            if total <= budget.num_bytes * (1 - 1 / BATCH):
                break
            total -= sizes.get(step, 0)
            chosen.append(step)
        return chosen

    def _measure(self, steps: Sequence[int]) -> dict[int, int]:
        for step in steps:
            if step not in self._sizes:
                try:
                    self._sizes[step] = store.record_bytes(self._run, step)
                except (EvidenceError, OSError):
                    self._unreadable.add(step)
        return {step: self._sizes[step] for step in steps if step in self._sizes}

    def _protected(self, steps: Sequence[int], evidence: Iterable[int]) -> set[int]:
        """Return the steps that are kept: the first, and the windows of what may need them."""
        saved = checkpoint.checkpoint_steps(self._run)
        ends = [*steps[-1:], *saved, *evidence]
        windows = (_window_until(steps, end) for end in ends)
        return set(steps[:1]).union(*windows)

    def _verify(self, steps: Sequence[int]) -> list[int]:
        """Return the steps whose records can be read."""
        readable = []
        for step in steps:
            try:
                store.verify_parts(self._run, step)
            except (EvidenceError, OSError):
                self._unreadable.add(step)
            else:
                readable.append(step)
        return readable

    def _remove(self, step: int, steps: Sequence[int], evidence: set[int]) -> None:
        """List steps as dropped, then remove them."""
        recorded = store.complete_steps(self._run)
        protected = self._protected(recorded, evidence)
        steps = [s for s in steps if s not in protected]
        self._pending = None
        if not steps:
            return
        num_bytes = sum(self._measure(steps).values())
        event = {"step": step, "event": DROPPED_EVENT, "steps": to_ranges(steps)}
        message = (
            f"Dropped the records of {len(steps)} steps ({steps[0]} to {steps[-1]}), "
            f"{num_bytes / 1e6:,.1f} MB: output.keep_records."
        )
        self._append_event({**event, "says": message, "bytes": num_bytes})
        for old in steps:
            store.remove_step(store.step_folder(self._run, old))
            self._sizes.pop(old, None)


def _window_until(steps: Sequence[int], end: int) -> Sequence[int]:
    """Return a recorded step and the earlier ones that a check of it may read."""
    return [step for step in steps if step <= end][-WINDOW - 1 :]
