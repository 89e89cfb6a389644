"""Where the scoreboard on TRL keeps what TRL itself logged in a run."""

import re
from pathlib import Path


def log_of(folder: Path, *, cause: str, name: str, seed: int) -> Path:
    """Return the path of a run's log.

    >>> log_of(Path("board"), cause="healthy", name="beta 0", seed=2).as_posix()
    'board/logs/healthy/beta-0.2/trainer_state.json'
    """
    short = re.sub(r"[^a-z0-9]+", "-", name.lower())[:60]
    return folder / "logs" / cause / f"{short}.{seed}" / "trainer_state.json"
