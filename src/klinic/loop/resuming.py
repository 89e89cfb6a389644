"""Resumes a run from its newest valid checkpoint; refuses where recorded steps would be lost."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from klinic.errors import CheckpointError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS, RECIPE
from klinic.evidence.schema import CHECKPOINT_SCHEMA, STATE, refuse_newer, schema_of
from klinic.loop import checkpoint
from klinic.loop.folder import step_of
from klinic.loop.recovering import Recovering
from klinic.loop.run import Run
from klinic.loop.state import LoopState
from klinic.recipe.loading import load
from klinic.recipe.recipe import Recipe

ANEW = "or start again with --start-over, which moves this run aside"


def refuse_other_schema(folder: Path) -> None:
    """Refuse a run of another schema before loading or writing anything."""
    refuse_newer(folder)
    for path in sorted((folder / checkpoint.FOLDER).glob(f"step=*/{STATE}")):
        schema = schema_of(path)
        if schema is not None and schema != CHECKPOINT_SCHEMA:
            raise CheckpointError(
                f"{path}: has schema {schema}, and this klinic resumes schema {CHECKPOINT_SCHEMA}. "
                f"Nothing was changed. Resume it with the klinic that wrote it, {ANEW}."
            )


def find_start(folder: Path) -> checkpoint.Found:
    """Return the newest valid checkpoint; empty only if the run never wrote one."""
    checkpoint.restore_replaced(folder)
    back_to = Recovering(folder, None).plan.back_to
    found = checkpoint.newest_good(folder, at_most=back_to)
    if found.checkpoint is None:
        _refuse_loss(folder, found.broken)
    return found


def _refuse_loss(folder: Path, broken: Sequence[str]) -> None:
    last = last_step(folder)
    if saved := checkpoint.steps(folder):
        raise CheckpointError(
            f"{folder}: none of its {len(saved)} checkpoints can be read. "
            + " ".join(broken)
            + f" Starting from step 0 would replace the {last} steps that were recorded. Nothing "
            f"was changed. Restore a checkpoint from a copy, {ANEW}."
        )
    recipe = load(folder / RECIPE).recipe
    if last > _last_without_checkpoint(recipe):
        raise CheckpointError(
            f"{folder}: {last} steps were recorded, and there is no checkpoint, although the run "
            f"wrote some. Starting from step 0 would replace those steps. Nothing was changed. "
            f"Restore {checkpoint.FOLDER}/ from a copy, {ANEW}."
        )


def last_step(folder: Path) -> int:
    """Return the last step with a record or metrics."""
    logged = (step_of(entry, folder) for entry in Journal(folder / METRICS).entries())
    return max((0, *logged, *store.steps(folder)))


def _last_without_checkpoint(recipe: Recipe) -> float:
    """Return the last step that a run can reach before its first checkpoint."""
    if recipe.recovery is not None:
        return 0  # recovery writes a checkpoint before the first step
    return recipe.loop.checkpoint_every or float("inf")


def resume(run: Run, found: checkpoint.Found, console: Console) -> LoopState | None:
    """Restore a checkpoint, and discard later data; None if there was no checkpoint yet."""
    run.write_lost_decision()
    saved, back_to = found.checkpoint, run.recovering.plan.back_to
    state = None if saved is None else run.restore(saved)
    if back_to is not None:
        says = f"Killed during the rollback to the checkpoint of step {back_to}: repeating it."
        run.events.append({"step": back_to, "event": "resumed rollback", "says": says})
    for problem in found.broken:
        _say(console, f"Broken checkpoint: {problem} Using the one before.")
        run.events.append({"event": "broken checkpoint", "problem": problem})
    step = 0 if saved is None else saved.step
    told = "No checkpoint yet: starting from step 0."
    _say(console, told if saved is None else f"Resuming after step {step}.")
    checkpoint.set_aside_damaged(run.folder, after=step, at_most=back_to)
    checkpoint.forget_unfinished(run.folder)
    # a checkpoint is written after everything else of its step; without one, discard all
    run.forget_after(step if saved is not None else -1)
    run.recovering.arrived()
    run.events.append({"event": "resumed", "step": step})
    return state


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
