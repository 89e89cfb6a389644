"""`klinic` as a command, in a process that has torch already.

Importing torch and transformers takes longer than most commands do. So a server imports them once,
with nothing else in it, and every command is forked off from there: nobody supervises it.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PRELOADED = ["klinic.training.train", "klinic.model.tiny", "klinic.verify.proof", "peft"]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(PRELOADED)


def klinic(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `klinic` with arguments; return what it printed and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, "out"), Path(folder, "err")]
        told = (arguments, str(cwd or Path.cwd()), dict(env or os.environ), list(map(str, printed)))
        process = _FORKS.Process(target=_inside, args=told)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        out, err = (path.read_text() for path in printed)
        return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _inside(arguments: tuple[str, ...], cwd: str, env: dict[str, str], printed: list[str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env, KLINIC_SUPERVISED="0")
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["klinic", *arguments]
    from klinic.cli import main

    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
