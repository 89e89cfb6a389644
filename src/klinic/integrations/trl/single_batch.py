"""`klinic check --trl`: runs and diagnoses two steps of a user's TRL trainer, with all probes.

The user's function builds the trainer. It trains unchanged, except for two steps only and without
saving or reporting. The records are then diagnosed like those of any run.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from klinic.checks import CHECKS
from klinic.doctor.cases import entries_by_step, merge_entries, read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.errors import FunctionError, error_text
from klinic.evidence import store
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS
from klinic.integrations.trl.attach import attach
from klinic.integrations.trl.reference import unwrap_policy
from klinic.integrations.trl.session import TRLSession
from klinic.model.loading import num_parameters
from klinic.replay.check_report import CheckReport
from klinic.replay.single_batch import NUM_SHOWN

NUM_STEPS = 2
REPORTER_MODULE = "transformers.integrations"  # module of the reporting callbacks


def check_trl_trainer(
    make_trainer: Callable[[], Any], name: str, report_progress: Callable[[str], None]
) -> CheckReport:
    """Build a trainer, train it for two steps, and return a summary of each part."""
    checked = CheckReport()
    report_progress("making the trainer")
    try:
        trainer = make_trainer()
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        description = f"{type(error).__name__}: {error_text(error)}"
        raise FunctionError(
            f"{name} failed: {description}. It must return a trl.GRPOTrainer."
        ) from error
    with tempfile.TemporaryDirectory(prefix="klinic-check-") as temporary:
        folder = Path(temporary) / "run"
        session = attach(
            trainer, folder, monitor_kl_every=1, console=Console(file=io.StringIO(), quiet=True)
        )
        _isolate_trainer(trainer, Path(temporary) / "output")
        report_progress("two steps: sampling, rewards, scoring, updates")
        with session, contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        _add_part_summaries(session, checked)
        checked.diagnosis = diagnose(read_cases(folder), CHECKS)
    return checked


def _isolate_trainer(trainer: Any, output: Path) -> None:
    """Limit the trainer to two steps, without checkpoints, evaluation or reporting."""
    args = trainer.args
    args.max_steps, args.save_strategy, args.eval_strategy = NUM_STEPS, "no", "no"
    args.output_dir, args.disable_tqdm = str(output), True
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__.startswith(REPORTER_MODULE):
            trainer.remove_callback(callback)


def _add_part_summaries(session: TRLSession, checked: CheckReport) -> None:
    trainer, folder = session.trainer, session.folder
    record = store.read_record(folder, 1)
    metrics = merge_entries(entries_by_step(folder / METRICS)[1])
    sizes = num_parameters(unwrap_policy(trainer))
    checked.add_component(
        "model and device",
        f"{sizes['num_parameters']:,} parameters, {sizes['num_trainable']:,} trained, on "
        f"{trainer.accelerator.device}",
    )
    checked.add_component(
        "sampling",
        f"{record.num_rows} completions of {metrics['completions/mean_length']:.1f} tokens, "
        f"{metrics['completions/clipped_ratio']:.0%} truncated without EOS",
    )
    has_reward = record.reward is not None and bool(np.isfinite(record.reward).any())
    checked.add_component(
        "rewards", f"mean {metrics.get('reward', float('nan')):.3f}", ok=has_reward
    )
    checked.add_component(
        "scoring", _describe_scoring(record, metrics), ok=_all_logp_finite(record)
    )
    kind = "none" if session.reference is None else session.reference.kind
    kl = metrics.get("kl_k1/mean")
    checked.add_component("reference", kind if kl is None else f"{kind}, {abs(kl):.1e} nats away")
    norm = metrics.get("grad_norm")
    norm_text = "is non-finite" if norm is None else f"{norm:.4f}"
    checked.add_component("update", f"gradient norm {norm_text}, discarded", ok=norm is not None)
    checked.samples = list(session.first_completions(NUM_SHOWN))


def _describe_scoring(record: StepRecord, metrics: dict[str, Any]) -> str:
    tokens = f"{int(record.loss_mask.sum())} tokens"
    difference = metrics.get("sampling/sampling_logp_difference/max")
    if difference is None:
        return f"{tokens}; the sampler reports no log-probs to compare with"
    return f"{tokens}, {difference:.1e} nats at most from the sampler"


def _all_logp_finite(record: StepRecord) -> bool:
    return record.logp is not None and bool(np.isfinite(record.logp[record.loss_mask]).all())
