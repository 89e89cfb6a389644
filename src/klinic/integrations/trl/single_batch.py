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
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.reading import by_step, merged, read_cases
from klinic.errors import FunctionError, text_of
from klinic.evidence import store
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS
from klinic.integrations.trl.attached import Attached
from klinic.integrations.trl.attaching import attach
from klinic.integrations.trl.reference import policy_of
from klinic.model.loading import num_parameters
from klinic.probe.single_batch import SHOWN, Checked

STEPS = 2
REPORTERS = "transformers.integrations"  # module of the reporting callbacks


def single_batch(make: Callable[[], Any], name: str, tell: Callable[[str], None]) -> Checked:
    """Build a trainer, train it for two steps, and return a summary of each part."""
    found = Checked()
    tell("making the trainer")
    try:
        trainer = make()
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        what = f"{type(error).__name__}: {text_of(error)}"
        raise FunctionError(f"{name} failed: {what}. It must return a trl.GRPOTrainer.") from error
    with tempfile.TemporaryDirectory(prefix="klinic-check-") as temporary:
        folder = Path(temporary) / "run"
        attached = attach(
            trainer, folder, monitor_kl_every=1, console=Console(file=io.StringIO(), quiet=True)
        )
        _keep_to_itself(trainer, Path(temporary) / "output")
        tell("two steps: sampling, rewards, scoring, updates")
        with attached, contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        _say_parts(attached, found)
        found.diagnosis = diagnose(read_cases(folder), CHECKS)
    return found


def _keep_to_itself(trainer: Any, output: Path) -> None:
    """Limit the trainer to two steps, without checkpoints, evaluation or reporting."""
    args = trainer.args
    args.max_steps, args.save_strategy, args.eval_strategy = STEPS, "no", "no"
    args.output_dir, args.disable_tqdm = str(output), True
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__module__.startswith(REPORTERS):
            trainer.remove_callback(callback)


def _say_parts(attached: Attached, found: Checked) -> None:
    trainer, folder = attached.trainer, attached.folder
    record = store.read_record(folder, 1)
    metrics = merged(by_step(folder / METRICS)[1])
    sizes = num_parameters(policy_of(trainer))
    found.add(
        "model and device",
        f"{sizes['num_parameters']:,} parameters, {sizes['num_trainable']:,} trained, on "
        f"{trainer.accelerator.device}",
    )
    found.add(
        "sampling",
        f"{record.num_rows} completions of {metrics['completions/mean_length']:.1f} tokens, "
        f"{metrics['completions/clipped_ratio']:.0%} truncated without EOS",
    )
    graded = record.reward is not None and bool(np.isfinite(record.reward).any())
    found.add("rewards", f"mean {metrics.get('reward', float('nan')):.3f}", ok=graded)
    found.add("scoring", _scoring(record, metrics), ok=_all_numbers(record))
    kind = "none" if attached.reference is None else attached.reference.kind
    apart = metrics.get("kl_k1/mean")
    found.add("reference", kind if apart is None else f"{kind}, {abs(apart):.1e} nats away")
    norm = metrics.get("grad_norm")
    said = "is non-finite" if norm is None else f"{norm:.4f}"
    found.add("update", f"gradient norm {said}, discarded", ok=norm is not None)
    found.shown = list(attached.shown(SHOWN))


def _scoring(record: StepRecord, metrics: dict[str, Any]) -> str:
    tokens = f"{int(record.loss_mask.sum())} tokens"
    apart = metrics.get("sampling/sampling_logp_difference/max")
    if apart is None:
        return f"{tokens}; the sampler reports no log-probs to compare with"
    return f"{tokens}, {apart:.1e} nats at most from the sampler"


def _all_numbers(record: StepRecord) -> bool:
    return record.logp is not None and bool(np.isfinite(record.logp[record.loss_mask]).all())
