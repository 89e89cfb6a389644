"""Other doctors of RL training, asked about logs of TRL in their own environment.

    python -m bench.ask_other_tools < LOGS > FINDINGS

A line of LOGS is a trainer's state with its log_history. Nothing of klinic is needed here, and each
doctor reads the log by its own code: rldoctor as a file, the others by their callbacks for TRL.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

RIVALS = ("rldoctor", "rlwatch", "rlprobe")
EAGER = "{}, eager"  # notes are findings too, and waiting is as short as settings allow
NOTES = ("INFO", "info")
LONGEST = 90  # characters of a sentence that are kept


def ask(rival: str, state: dict[str, Any], folder: Path, *, eager: bool) -> list[list[str]]:
    """Return name, severity and sentence of each finding, in the order in which they are told."""
    stand_in = ModuleType("transformers")  # their callbacks want a class to inherit, and no more
    stand_in.TrainerCallback = object  # type: ignore[attr-defined]
    sys.modules.setdefault("transformers", stand_in)
    asked = {"rldoctor": _rldoctor, "rlwatch": _rlwatch, "rlprobe": _rlprobe}[rival]
    found = asked(state, folder, eager)
    kept = [f for f in found if eager or f[1] not in NOTES]
    return [[name, severity, text[:LONGEST]] for name, severity, text in kept]


def _rldoctor(state: dict[str, Any], folder: Path, eager: bool) -> list[list[str]]:  # noqa: ARG001
    from rl_doctor import diagnose, load_run

    (folder / "trainer_state.json").write_text(json.dumps(state))
    found = diagnose(load_run(str(folder / "trainer_state.json"))).problems
    return [[f.detector, f.severity.name, f.summary] for f in found]


def _rlwatch(state: dict[str, Any], folder: Path, eager: bool) -> list[list[str]]:
    import rlwatch
    from rlwatch.core import _build_trl_callback

    sections = "kl_explosion reward_hacking advantage_variance gradient_norm_spike"
    soon: dict[str, Any] = {name: {"warmup_steps": 0} for name in sections.split()}
    for name in ("entropy_collapse", "reward_mean_drift"):
        soon[name] = {"warmup_steps": 0, "consecutive_steps": 3}
    where = {"storage": {"log_dir": str(folder)}}
    monitor = rlwatch.attach(framework="manual", **where, **(soon if eager else {}))
    alerts: list[Any] = []
    log_step = monitor.log_step
    monitor.log_step = lambda step, **known: alerts.extend(log_step(step, **known))
    callback = _build_trl_callback(monitor)()
    for row in state["log_history"]:
        callback.on_log(None, argparse.Namespace(global_step=row["step"]), None, logs=row)
    monitor.stop()
    return [[a.detector, a.severity, f"step {a.step}: {a.message}"] for a in alerts]


def _rlprobe(state: dict[str, Any], folder: Path, eager: bool) -> list[list[str]]:
    from rlprobe.doctor import diagnose
    from rlprobe.doctor.base import REGISTRY, Detector
    from rlprobe.integrations.trl import _map_logs
    from rlprobe.recorder import Recorder

    with Recorder(folder / "run", algorithm="grpo", capture_env=False) as recorder:
        for row in state["log_history"]:
            spread = {"adv_std": row["advantage_std"]} if "advantage_std" in row else {}
            recorder.log_step(row["step"], **_map_logs(row) | spread)
    Detector.min_steps = 1 if eager else 30
    soon = {d.id.lower(): {"sustain": 3} for d in REGISTRY if eager and "sustain" in d.defaults}
    found = diagnose(folder / "run", config=soon)
    return [[f.signature_id, f.severity, f.explanation] for f in found]


def answer() -> None:
    """Read logs from the standard input, a line each, and write what each doctor finds in them."""
    out, sys.stdout = sys.stdout, sys.stderr  # what they print is not for us
    for line in sys.stdin:
        said: dict[str, Any] = {}
        for rival in RIVALS:
            for eager in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    found = ask(rival, json.loads(line), Path(folder), eager=eager)
                said[EAGER.format(rival) if eager else rival] = found
        versions = {rival: version(rival) for rival in RIVALS}
        out.write(json.dumps({"said": said, "versions": versions}) + "\n")


if __name__ == "__main__":
    answer()
