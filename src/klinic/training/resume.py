"""Resumes a run from its newest valid checkpoint; refuses where recorded steps would be lost."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from klinic.errors import CheckpointError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS, RECIPE
from klinic.evidence.schema import CHECKPOINT_SCHEMA, STATE, read_schema, refuse_newer
from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.training import checkpoint
from klinic.training.recovery import RecoveryManager
from klinic.training.run import Run
from klinic.training.run_folder import entry_step
from klinic.training.state import LoopState

START_OVER_HINT = "or start again with --start-over, which moves this run aside"


def refuse_other_schema(folder: Path) -> None:
    """Refuse a run of another schema before loading or writing anything."""
    refuse_newer(folder)
    for path in sorted((folder / checkpoint.FOLDER).glob(f"step=*/{STATE}")):
        schema = read_schema(path)
        if schema is not None and schema != CHECKPOINT_SCHEMA:
            raise CheckpointError(
                f"{path}: has schema {schema}, and this klinic resumes schema {CHECKPOINT_SCHEMA}. "
                f"Nothing was changed. Resume it with the klinic that wrote it, {START_OVER_HINT}."
            )


def find_resume_point(folder: Path) -> checkpoint.CheckpointSearch:
    """Return the newest valid checkpoint; empty only if the run never wrote one."""
    checkpoint.restore_replaced(folder)
    back_to = RecoveryManager(folder, None).plan.back_to
    search = checkpoint.newest_valid(folder, max_step=back_to)
    if search.checkpoint is None:
        _refuse_lost_steps(folder, search.broken)
    return search


def _refuse_lost_steps(folder: Path, broken: Sequence[str]) -> None:
    last = last_step(folder)
    if saved := checkpoint.checkpoint_steps(folder):
        raise CheckpointError(
            f"{folder}: none of its {len(saved)} checkpoints can be read. "
            + " ".join(broken)
            + f" Starting from step 0 would replace the {last} steps that were recorded. Nothing "
            f"was changed. Restore a checkpoint from a copy, {START_OVER_HINT}."
        )
    recipe = load_recipe(folder / RECIPE).recipe
    if last > _last_without_checkpoint(recipe):
        raise CheckpointError(
            f"{folder}: {last} steps were recorded, and there is no checkpoint, although the run "
            f"wrote some. Starting from step 0 would replace those steps. Nothing was changed. "
            f"Restore {checkpoint.FOLDER}/ from a copy, {START_OVER_HINT}."
        )


def last_step(folder: Path) -> int:
    """Return the last step with a record or metrics."""
    logged = (entry_step(entry, folder) for entry in Journal(folder / METRICS).entries())
    return max((0, *logged, *store.complete_steps(folder)))


def _last_without_checkpoint(recipe: Recipe) -> float:
    """Return the last step that a run can reach before its first checkpoint."""
    if recipe.recovery is not None:
        return 0  # recovery writes a checkpoint before the first step
    return recipe.loop.checkpoint_every or float("inf")


def resume_run(run: Run, search: checkpoint.CheckpointSearch, console: Console) -> LoopState | None:
    """Restore a checkpoint, and discard later data; None if there was no checkpoint yet."""
    run.log.write_lost_decision(run.recovery.event)
    saved, back_to = search.checkpoint, run.recovery.plan.back_to
    state = None if saved is None else run.restore(saved)
    if back_to is not None:
        message = f"Killed during the rollback to the checkpoint of step {back_to}: repeating it."
        run.log.events.append({"step": back_to, "event": "resumed rollback", "says": message})
    for problem in search.broken:
        _print_line(console, f"Broken checkpoint: {problem} Using the one before.")
        run.log.events.append({"event": "broken checkpoint", "problem": problem})
    step = 0 if saved is None else saved.step
    fresh_start = "No checkpoint yet: starting from step 0."
    _print_line(console, fresh_start if saved is None else f"Resuming after step {step}.")
    checkpoint.set_aside_damaged(run.parts.folder, after=step, max_step=back_to)
    checkpoint.remove_unfinished(run.parts.folder)
    # a checkpoint is written after everything else of its step; without one, discard all
    run.discard_after(step if saved is not None else -1)
    run.recovery.finish_rollback()
    run.log.events.append({"event": "resumed", "step": step})
    return state


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
