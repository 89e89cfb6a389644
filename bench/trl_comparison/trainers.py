"""A run with klinic, a run with TRL; each returns the folder of the trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.trl_comparison.entry import Entry
from bench.trl_comparison.prompts import Watch
from bench.trl_comparison.settings import for_klinic, for_trl
from klinic.tasks.base import Row


def with_klinic(
    entry: Entry, watch: Watch, *, start: Path, rows: Sequence[Row], output: Path
) -> Path:
    """Train with klinic, which puts the rows in order itself."""
    import klinic

    result = klinic.train(
        str(start), reward_funcs=watch.reward, train_dataset=rows, **for_klinic(entry, output)
    )
    return Path(result.model)


def with_trl(
    entry: Entry, watch: Watch, *, start: Path, by_step: Sequence[Sequence[Row]], output: Path
) -> Path:
    """Train with TRL, on rows that are in order."""
    trainer = trl_trainer(entry, watch, start=start, by_step=by_step, output=output)
    trainer.train()
    trainer.save_model(str(output / "model"))
    return output / "model"


def trl_trainer(
    entry: Entry,
    watch: Watch,
    *,
    start: Path,
    by_step: Sequence[Sequence[Row]],
    output: Path,
    **parts: Any,
) -> Any:
    """Return TRL's trainer, ready to train; `parts` are further arguments of it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=str(start),  # by name: TRL loads its reference from there, too
        reward_funcs=watch.reward,
        args=GRPOConfig(**for_trl(entry, output)),
        train_dataset=Dataset.from_list([dict(row) for rows in by_step for row in rows]),
        **parts,
    )
