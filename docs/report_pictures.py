"""Take the pictures of `docs/how-to/report.md`.

    PYTHONPATH=tests python docs/report_pictures.py [FOLDER] [NAME ...]

It trains a healthy run, one of each fault and one with another KL coefficient, writes a scalar log,
and photographs their reports in headless Chromium. Runs that FOLDER has are not trained again.
Needs `klinic[train]`, websockets and Chromium. Look at each picture before you commit it.
"""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from browser import Browser
from klinic.cli.report import read_any_report
from klinic.evidence.store import complete_steps
from klinic.faults import FAULTS
from klinic.lab.scoreboard_run import train_trial
from klinic.report.page import render

IMAGES = Path(__file__).parent.absolute() / "how-to" / "images"
WIDTH, HEIGHT = 1100, 900
HEIGHTS = {"comparison": 1320}  # down to the first curves
STEPS = 10
FAULTY = (
    *("stale-sampler", "wrong-reference", "temperature-on-one-side"),
    *("wrong-loss-mask", "kl-sign-flipped", "broken-reward"),
)
HEALTHY, OTHER = Path("runs/healthy"), Path("runs/coefficient-0.5")
LOG = Path("outputs/trainer_state.json")
LOG_STEPS = 200
TO_TOKENS = "document.querySelector('.answers a[href*=completion]').click()"
TO_TOP = "scrollTo(0, 0)"


def train_missing(run: Path) -> Path:
    """Train the run of a name, unless it is there."""
    if len(complete_steps(run)) == STEPS:
        return run
    shutil.rmtree(run, ignore_errors=True)
    fault = next((fault for fault in FAULTS if fault.cause == run.name), None)
    settings = {"kl.coef": 0.5} if run == OTHER else {}
    return train_trial(run, fault, **{"loop.max_steps": STEPS, **settings})


def write_log() -> Path:
    """Write a log whose KL starts above 0 and explodes."""
    waves = [math.sin(step * 1.7) for step in range(LOG_STEPS)]
    history = [
        {
            "step": step,
            "reward": 0.5 + 0.02 * wave,
            "reward_std": 0.1 + 0.005 * wave,
            "kl": 3.0 * math.exp(step / 40) * (1 + 0.02 * wave),
            "loss": 0.1 + 0.003 * wave,
            "grad_norm": 1.0 + 0.05 * wave,
            "completions/mean_length": 180.0 + 6 * wave,
        }
        for step, wave in enumerate(waves)
        if step
    ]
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text(json.dumps({"log_history": history}))
    return LOG


def picture_plans() -> dict[str, tuple[tuple[Callable[[], Path], ...], str, bool]]:
    """Return for each picture: its runs, where to look, and whether it is dark."""

    def run(path: Path) -> Callable[[], Path]:
        return lambda: train_missing(path)

    plans = {
        name: ((run(HEALTHY.with_name(name)),), TO_TOP, False) for name in (HEALTHY.name, *FAULTY)
    }
    return {
        **plans,
        "tokens": ((run(HEALTHY.with_name(FAULTY[0])),), TO_TOKENS, False),
        "comparison": ((run(HEALTHY), run(OTHER)), TO_TOP, True),
        "log": ((write_log,), TO_TOP, False),
    }


def main() -> None:
    """Take all pictures, or those that are named."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        sys.exit("This script needs Chromium.")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="klinic-pictures-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # reports name runs by the path that is given
    plans = picture_plans()
    with tempfile.TemporaryDirectory() as profile, Browser(program, profile) as browser:
        for name in sys.argv[2:] or plans:
            runs, look, dark = plans[name]
            page = Path(f"{name}.html").absolute()
            page.write_text(render([read_any_report(find()) for find in runs]), encoding="utf-8")
            browser.look_like(width=WIDTH, height=HEIGHTS.get(name, HEIGHT), dark=dark)
            browser.open(page.as_uri())
            browser.run("pageReady")
            browser.run(f"{look}; new Promise((done) => setTimeout(done, 300))")
            (IMAGES / f"report-{name}.png").write_bytes(browser.picture())
    if browser.logged:
        sys.exit(f"The browser logged: {browser.logged}")


if __name__ == "__main__":
    main()
