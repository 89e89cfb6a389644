"""`klinic.attach(trainer)`: adds records, doctor and KL term to an unmodified TRL GRPOTrainer.

klinic wraps private methods of TRL, which change between versions: others are refused.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.errors import ConfigError, MissingExtraError
from klinic.integrations.trl.run_log import DOCTOR_MODES, TRLRunLog
from klinic.integrations.trl.session import SESSION_ATTRIBUTE, AttachOptions, TRLSession
from klinic.recipe.sections import KLSection, RecoverySection
from klinic.training.run_folder import new_folder

OLDEST_TESTED, NEWEST_TESTED = (1, 14), (1, 16)


def require_trl() -> None:
    """Raise if TRL is missing or its version is untested."""
    if find_spec("trl") is None:
        raise MissingExtraError('this needs trl. Install it with: pip install "klinic[trl]"')
    import trl

    reject_untested(str(trl.__version__))


def reject_untested(version: str) -> None:
    """Raise ConfigError for a version outside the tested range.

    >>> reject_untested("1.15.0")
    >>> reject_untested("1.16.0.dev0")
    """
    version_match = re.match(r"(\d+)\.(\d+)", version)
    major_minor = (int(version_match[1]), int(version_match[2])) if version_match else (0, 0)
    if not OLDEST_TESTED <= major_minor <= NEWEST_TESTED:
        tested_range = " to ".join(
            ".".join(map(str, bound)) for bound in (OLDEST_TESTED, NEWEST_TESTED)
        )
        raise ConfigError(
            f"TRL is {version}, but klinic.attach wraps private methods and is tested with TRL "
            f"{tested_range} only: its records could differ from "
            "the data that TRL trains on. Install a "
            'tested version: pip install "klinic[trl]".'
        )


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
) -> TRLSession:
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
    _reject_unsupported(trainer, doctor=doctor, monitor_kl_every=monitor_kl_every)
    advice = "Give the folder of a new run: klinic.attach(trainer, FOLDER)."
    folder_name = None if folder is None else str(folder)
    run_folder = new_folder(folder_name, "trl", instead=advice)
    run_log = TRLRunLog(run_folder, doctor=doctor, console=console or Console(highlight=False))
    options = AttachOptions(
        monitor_kl_every=monitor_kl_every,
        parse=parse,
        accuracy=accuracy,
        kl=kl,
        recovery=recovery,
    )
    return TRLSession(trainer, run_log, options)


def _reject_unsupported(trainer: Any, *, doctor: str, monitor_kl_every: int) -> None:
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise ConfigError(
            f"klinic.attach received a {type(trainer).__name__}: it supports TRL's GRPOTrainer "
            "only. Pass one, before trainer.train()."
        )
    if hasattr(trainer, SESSION_ATTRIBUTE):
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
    if doctor not in DOCTOR_MODES:
        raise ConfigError(f"doctor is {doctor!r}. Use tell, stop or none.")
    if monitor_kl_every < 0:
        raise ConfigError(f"monitor_kl_every is {monitor_kl_every}. Use 0 for never, or more.")
