"""`trainer.checkpoint_callback_class=klinic.integrations.verl.KlinicCallback`: the line of a user.

verl creates the class named there in the process of its trainer, with the configuration alone. The
callback wraps two methods of the trainer's class: the one that computes the metrics of a finished
step, when the batch is still in the TransferQueue, and `fit`, which ends the run.
"""

import inspect
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

from klinic.doctor.foreign_run_log import DOCTOR_MODES
from klinic.doctor.recorder import Recorder
from klinic.doctor.recorder_settings import DoctorMode
from klinic.errors import ConfigError, RunStoppedError, error_text
from klinic.integrations.verl.batch import FIELDS, read_batch, step_arguments
from klinic.integrations.verl.settings import VerlConfig, recorder_settings

STEP_METHOD, RUN_METHOD = "_compute_metrics", "fit"
STEP_PARAMETERS = ("batch", "metrics", "global_steps")
SECONDS = "timing_s/klinic"
"""The name of klinic's seconds among verl's metrics of a step."""
HOOKED = "_klinic_hooked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keys below `klinic` in verl's configuration."""

    folder: str | None
    doctor: DoctorMode


class KlinicCallback:
    """Records every step of a verl run and diagnoses it while it trains.

    Options are keys of the configuration: `+klinic.folder=DIR` (by default the next free
    `runs/verl`) and `+klinic.doctor=tell|stop|none`. A failure of klinic is printed and never ends
    the training. For a callback of your own, subclass it and define `on_save`.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = VerlConfig(to_plain(config))
        self._options = read_options(self.config["klinic"])
        self._recorder: Recorder | None = None
        self._failures: list[str] = []
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        if missing := hook_trainer(PPOTrainer):
            print_line(f"This version of verl has no {missing}: nothing will be recorded.")

    def on_save(self, *_: Any, **__: Any) -> None:
        """Do nothing after a checkpoint."""

    def record_step(self, trainer: Any, batch: Any, metrics: MutableMapping[str, Any]) -> None:
        """Record a finished step; print a failure instead of raising it."""
        start = time.perf_counter()
        step = int(trainer.global_steps)
        try:
            self._record(trainer, batch, metrics, step)
        except RunStoppedError:  # the user chose `doctor=stop`
            raise
        except Exception as error:  # a failure of klinic must not end the training
            self._report_failure(f"step {step}", error)
        metrics[SECONDS] = time.perf_counter() - start

    def end_run(self) -> None:
        """Print the diagnosis of the last step, and what was not recorded."""
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is not None:
                recorder.close()
        except RunStoppedError:
            raise
        except Exception as error:  # likewise
            self._report_failure("the end of the run", error)
        if recorder is None:
            print_line("No step was recorded, so nothing was examined.")
        elif self._failures:
            print_line(f"{len(self._failures)} failures, the last one: {self._failures[-1]}")

    def _record(self, trainer: Any, batch: Any, metrics: Mapping[str, Any], step: int) -> None:
        import transfer_queue

        fields = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
        )
        rows = read_batch(fields, batch.keys, batch.tags, num_learners(trainer))
        arguments = step_arguments(rows, metrics, self.config, step)
        if self._recorder is None:
            self._recorder = self._open_recorder(trainer)
        self._recorder.record_step(**arguments)

    def _open_recorder(self, trainer: Any) -> Recorder:
        max_steps = getattr(trainer, "total_training_steps", None)
        settings = recorder_settings(
            self.config,
            trainer.tokenizer,
            eos_ids=read_eos_ids(trainer.tokenizer),
            max_steps=None if max_steps is None else int(max_steps),
        )
        folder = free_folder(self._options.folder)
        print_line(f"Run: {folder.resolve()}")
        return Recorder(folder, doctor=self._options.doctor, **settings)

    def _report_failure(self, what: str, error: Exception) -> None:
        sentence = f"{what} was not recorded: {type(error).__name__}: {error_text(error)}"
        self._failures.append(sentence)
        print_line(f"{sentence} Training continues.")


def hook_trainer(trainer_class: type) -> str | None:
    """Wrap the methods of the trainer's class once; return what it lacks, or None.

    The wrapped methods do nothing unless the callback of their trainer is a `KlinicCallback`.
    """
    step_method = getattr(trainer_class, STEP_METHOD, None)
    run_method = getattr(trainer_class, RUN_METHOD, None)
    if step_method is None or run_method is None:
        return f"method PPOTrainer.{STEP_METHOD if step_method is None else RUN_METHOD}"
    absent = [n for n in STEP_PARAMETERS if n not in inspect.signature(step_method).parameters]
    if absent:
        return f"parameter {absent[0]} of PPOTrainer.{STEP_METHOD}"
    if getattr(step_method, HOOKED, False):
        return None

    @wraps(step_method)
    def record_after(trainer: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        result = step_method(trainer, batch, metrics, *args, **kwargs)
        if (callback := callback_of(trainer)) is not None:
            callback.record_step(trainer, batch, metrics)
        return result

    @wraps(run_method)
    def end_after(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run_method(trainer, *args, **kwargs)
        finally:
            if (callback := callback_of(trainer)) is not None:
                callback.end_run()

    setattr(record_after, HOOKED, True)
    setattr(trainer_class, STEP_METHOD, record_after)
    setattr(trainer_class, RUN_METHOD, end_after)
    return None


def callback_of(trainer: Any) -> KlinicCallback | None:
    """Return the klinic callback of a trainer, if that is what its configuration names."""
    callback = getattr(trainer, "checkpoint_callback", None)
    return callback if isinstance(callback, KlinicCallback) else None


def num_learners(trainer: Any) -> int:
    """Return the number of data-parallel processes between which verl splits a batch; 1: unknown.

    A step of several local updates concatenates their batches, each split on its own.
    """
    if getattr(trainer, "parameter_sync_step", 1) != 1:
        return 1
    dispatch = getattr(getattr(trainer, "actor_rollout_wg", None), "_dispatch_info", None) or {}
    ranks = dispatch.get("actor") or [0]
    return int(max(ranks)) + 1


def read_eos_ids(tokenizer: Any) -> list[int]:
    """Return the end tokens of the generation config beside the tokenizer; empty without one."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except (OSError, ValueError):
        return []
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def to_plain(config: Any) -> Mapping[str, Any]:
    """Return a configuration of OmegaConf as plain mappings."""
    if isinstance(config, dict):
        return config
    from omegaconf import OmegaConf

    plain: Mapping[str, Any] = OmegaConf.to_container(config, resolve=True)
    return plain


def read_options(options: Any) -> Options:
    """Return the options; refuse unknown ones before the training starts."""
    chosen = dict(options or {})
    if unknown := [name for name in chosen if name not in Options.__annotations__]:
        raise ConfigError(
            f"klinic.{unknown[0]} is no option of klinic in verl. Use +klinic.folder=DIR or "
            f"+klinic.doctor={'|'.join(DOCTOR_MODES)}."
        )
    if chosen.get("doctor", "tell") not in DOCTOR_MODES:
        raise ConfigError(
            f"klinic.doctor is {chosen['doctor']!r}. Use one of {', '.join(DOCTOR_MODES)}."
        )
    return Options(folder=chosen.get("folder"), doctor=chosen.get("doctor", "tell"))


def free_folder(chosen: str | None) -> Path:
    """Return the chosen folder, by default runs/verl, or the next free name: -2, -3, ...

    A restarted job has the same configuration, and must not end because of it.
    """
    first = Path(chosen or "runs/verl").expanduser()
    names = (first if n == 1 else first.with_name(f"{first.name}-{n}") for n in count(1))
    return next(folder for folder in names if not folder.exists() or is_empty(folder))


def is_empty(folder: Path) -> bool:
    """Whether a path is a folder without files."""
    return folder.is_dir() and not any(folder.iterdir())


def print_line(sentence: str) -> None:
    """Print one line to the console of the trainer's process."""
    sys.stdout.write(f"klinic | {sentence}\n")
    sys.stdout.flush()
