"""`klinic.attach(trainer)`: records, doctor and KL beside an unmodified TRL GRPOTrainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.errors import ConfigError
from klinic.integrations.trl.attached import MARK, Attached, Wanted
from klinic.integrations.trl.keeping import HOW, Keeper
from klinic.integrations.trl.versions import require_trl
from klinic.loop.folder import new_folder
from klinic.recipe.kl import KLSection
from klinic.recipe.recovery import RecoverySection


def attach(  # noqa: PLR0913 - what a user may ask for, by name
    trainer: Any,
    folder: str | Path | None = None,
    *,
    doctor: str = "tell",
    monitor_kl_every: int = 0,
    parse: Callable[[str], Any] | None = None,
    accuracy: str | None = None,
    kl: KLSection | None = None,
    recovery: RecoverySection | None = None,
    console: Console | None = None,
) -> Attached:
    """Record every step of a TRL GRPOTrainer, and examine it while it trains.

    `folder` is that of the run, new or empty; without one it is the next free `runs/trl`. `doctor`
    is `tell` (say what was found), `stop` (and end the training), or `none`. `monitor_kl_every=N`
    measures the KL to the start in every N-th step also where beta is 0. `parse` returns the answer
    in a completion, or None where there is none. `accuracy` names the reward function that says
    whether an answer is right: what TRL's evaluation measures of it counts as accuracy. `kl`, made
    by `klinic.KL(...)`, takes the place of TRL's KL term and of beta. `recovery`, made by
    `klinic.Recovery(...)`, says which updates are left out, and when to stop. Call `detach()` to
    undo all of it, or use it as a context.
    """
    require_trl()
    _refuse(trainer, doctor=doctor, monitor_kl_every=monitor_kl_every)
    instead = "Give the folder of a new run: klinic.attach(trainer, FOLDER)."
    chosen = None if folder is None else str(folder)
    where = new_folder(chosen, "trl", instead=instead)
    keeper = Keeper(where, doctor=doctor, console=console or Console(highlight=False))
    wanted = Wanted(
        monitor_kl_every=monitor_kl_every,
        parse=parse,
        accuracy=accuracy,
        kl=kl,
        recovery=recovery,
    )
    return Attached(trainer, keeper, wanted)


def _refuse(trainer: Any, *, doctor: str, monitor_kl_every: int) -> None:
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise ConfigError(
            f"klinic.attach was given a {type(trainer).__name__}: it knows how TRL's GRPOTrainer "
            "trains, and no other. Give it one, before trainer.train()."
        )
    if hasattr(trainer, MARK):
        raise ConfigError(
            "klinic is attached to this trainer already: every step would be recorded twice. "
            "Detach the first: attached.detach()."
        )
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled:
        raise ConfigError(
            f"this trainer runs in {trainer.accelerator.num_processes} processes, or with "
            "DeepSpeed: klinic.attach was tried with one process that holds whole weights, and "
            "would record a part of each group. Attach to a short run on one device."
        )
    if doctor not in HOW:
        raise ConfigError(f"doctor is {doctor!r}. Use tell, stop or none.")
    if monitor_kl_every < 0:
        raise ConfigError(f"monitor_kl_every is {monitor_kl_every}. Use 0 for never, or more.")
