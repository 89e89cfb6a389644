"""`klinic.attach(trainer)`: adds records, doctor and KL term to an unmodified TRL GRPOTrainer.

klinic wraps private methods of TRL, which change between versions: `capabilities.py` looks for
those that it needs.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.errors import ConfigError, MissingExtraError
from klinic.evidence.processes import call_on_rank_0
from klinic.integrations.torch_processes import TorchProcesses
from klinic.integrations.trl.capabilities import warn_about_lacks
from klinic.integrations.trl.loss_path import reject_hidden_loss
from klinic.integrations.trl.run_log import DOCTOR_MODES, TRLRunLog
from klinic.integrations.trl.session import SESSION_ATTRIBUTE, AttachOptions, TRLSession
from klinic.integrations.trl.sharding import reject_unsupported_layout
from klinic.recipe.sections import KLSection, RecoverySection
from klinic.training.run_folder import new_folder


def require_trl() -> None:
    """Raise if TRL is missing."""
    if find_spec("trl") is None:
        raise MissingExtraError('this needs trl. Install it with: pip install "klinic[trl]"')


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

    Call it before `trainer.train()`, in a run of several processes in each of them. Training is
    unchanged unless `kl` or `recovery` is set.

    Args:
        trainer: TRL's `GRPOTrainer`.
        folder: The run folder, new or empty; by default the next free `runs/trl`.
        doctor: `tell` reports causes, `stop` reports them and ends the training, `none` records
            only.
        monitor_kl_every: Steps between measurements of the KL to the initial policy, also at beta
            0; 0: never.
        parse: A function that returns the answer in a completion, or None.
        accuracy: The reward function whose mean in TRL's evaluation is recorded as accuracy.
        kl: A KL term of klinic, from `klinic.KL(...)`, that replaces TRL's and beta.
        recovery: Which updates are skipped and when to stop, from `klinic.Recovery(...)`.
        console: A rich console to print to; by default the terminal.

    Returns:
        The session: its `detach()` restores the trainer, as the end of a `with` block does.
    """
    require_trl()
    _reject_unsupported(trainer, doctor=doctor, monitor_kl_every=monitor_kl_every)
    reject_unsupported_layout(trainer, monitors=monitor_kl_every > 0, recovers=recovery is not None)
    warning = warn_about_lacks(trainer, _trl_version())
    advice = "Give the folder of a new run: klinic.attach(trainer, FOLDER)."
    folder_name = None if folder is None else str(folder)
    processes = TorchProcesses()
    run_folder = call_on_rank_0(
        processes, lambda: str(new_folder(folder_name, "trl", instead=advice))
    )
    run_log = TRLRunLog(
        Path(run_folder),
        doctor=doctor,
        console=console or Console(highlight=False),
        processes=processes,
    )
    options = AttachOptions(
        monitor_kl_every=monitor_kl_every,
        parse=parse,
        accuracy=accuracy,
        kl=kl,
        recovery=recovery,
    )
    if warning is not None:
        run_log.print_line(warning, style="yellow")
    return TRLSession(trainer, run_log, options)


def _trl_version() -> str:
    import trl

    return str(trl.__version__)


def _reject_unsupported(trainer: Any, *, doctor: str, monitor_kl_every: int) -> None:
    reject_hidden_loss(trainer)
    if hasattr(trainer, SESSION_ATTRIBUTE):
        raise ConfigError(
            "klinic is already attached to this trainer: every step would be recorded twice. "
            "Detach the first session: attached.detach()."
        )
    if doctor not in DOCTOR_MODES:
        raise ConfigError(f"doctor is {doctor!r}. Use tell, stop or none.")
    if monitor_kl_every < 0:
        raise ConfigError(f"monitor_kl_every is {monitor_kl_every}. Use 0 for never, or more.")
