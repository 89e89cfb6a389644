"""`klinic.attach(trainer)`: adds records, doctor and KL term to an unmodified TRL GRPOTrainer."""

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


def attach(  # noqa: PLR0913 - the user's options, by keyword
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
    """Record every step of a TRL GRPOTrainer and diagnose it during training.

    `folder` is the run folder, new or empty; the default is the next free `runs/trl`. `doctor` is
    `tell` (report causes), `stop` (report and end the training), or `none`. `monitor_kl_every=N`
    measures the KL to the initial policy every N steps, also at beta 0. `parse` returns the answer
    in a completion, or None. `accuracy` names the reward function whose mean in TRL's evaluation is
    recorded as accuracy. `kl`, from `klinic.KL(...)`, replaces TRL's KL term and beta. `recovery`,
    from `klinic.Recovery(...)`, sets which updates are skipped and when to stop. Call `detach()` to
    restore the trainer, or use the result as a context manager.
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
            f"klinic.attach received a {type(trainer).__name__}: it supports TRL's GRPOTrainer "
            "only. Pass one, before trainer.train()."
        )
    if hasattr(trainer, MARK):
        raise ConfigError(
            "klinic is already attached to this trainer: every step would be recorded twice. "
            "Detach the first session: attached.detach()."
        )
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled:
        raise ConfigError(
            f"this trainer runs in {trainer.accelerator.num_processes} processes, or with "
            "DeepSpeed: klinic.attach supports a single process with unsharded weights, and would "
            "record only a part of each group. Attach to a short run on one device."
        )
    if doctor not in HOW:
        raise ConfigError(f"doctor is {doctor!r}. Use tell, stop or none.")
    if monitor_kl_every < 0:
        raise ConfigError(f"monitor_kl_every is {monitor_kl_every}. Use 0 for never, or more.")
