"""Runs klinic's commands on hostile run folders and measures what each costs.

    python tests/hostile/hostile_folders.py             every case, every command, and a summary
    python tests/hostile/hostile_folders.py 40          a sample of so many
    python tests/hostile/hostile_folders.py 40 --fresh  each command in an interpreter of its own

A command is a process that is forked from one that has imported klinic and read a healthy run: its
memory is that of a fresh process, its CPU time without the imports (0.5 s; 1 s with matplotlib).
`--fresh` starts Python anew instead. Limits are CPU time, on a slow host more of it, and resident
memory: other programs share the machine, so the wall clock only tells a hang.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

from processor_speed import allowed_seconds

SECONDS = 2.0  # of the processor, for a command on a hostile folder
DRAWING = 2.0  # more for a page: matplotlib takes as long for a healthy run, import and drawing
MEMORY = 300  # MB, resident
SHARED = 60  # MB of libraries that a forked process uses and does not count
HANG = 90.0  # seconds of the clock: a busy machine takes 20 for one of the processor
ADDRESSES = 8 << 30  # bytes: so that a command that eats memory harms nobody
LOOKS = 3  # that a watch takes
CODES = (0, 1, 2)
OBEYED = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
WRONG = ("Traceback", "Internal error", "mistake in klinic", "Warning: ")
HAS_PLOT = find_spec("matplotlib") is not None
PAGES = ("report", "web")
COMMANDS = ("diagnose", "terminal", "watch", *(PAGES if HAS_PLOT else ()))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended and what it cost."""

    case: str
    command: str
    code: int
    cpu: float
    memory: int
    wall: float
    said: str
    wrong: str


def arguments(command, run, out):
    """Return the words of a command line."""
    return {
        "diagnose": ["diagnose", "--", run],
        "terminal": ["report", "--terminal", "--", run],
        "report": ["report", "--out", f"{out}/page.html", "--", run],
        "watch": ["watch", "--", run],
        "web": ["watch", "--web", "--", run],
    }[command]


# In the process that is measured


def run_command(command, run, out):
    """Run a command to its end. A watch takes a few looks; a server answers two requests."""
    sys.argv = ["klinic", *arguments(command, run, out)]
    from klinic.cli import app

    looks = 0

    def sleep(_):
        nonlocal looks
        looks += 1
        if looks >= LOOKS:
            raise KeyboardInterrupt

    if command == "watch":
        from klinic.cli import watch

        watch.time = SimpleNamespace(sleep=sleep)
    if command == "web":
        from klinic.report.serving import LivePage

        page = LivePage(Path(run))
        for _ in range(2):
            page.current_version()
            sys.stdout.write(f"{len(page.current_page())}\n")
        return
    getattr(app, "main", app)()


def forked(command, run, out):
    """Fork a process that runs a command; return its number."""
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command(command, run, out)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def started(command, run, out):
    """Start a command in an interpreter of its own; return its number."""
    program = [sys.executable, __file__, "--inside", command, run, out]
    with Path(out, "stdout").open("wb") as stdout, Path(out, "stderr").open("wb") as stderr:
        return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr).pid


def serve(model, out, fresh=""):
    """Read cases from standard input, run each and write how it ended: a small process."""
    printed = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # what is imported, and what matplotlib does once; a fresh interpreter is started from a small
    # process, since the memory of the one that starts it counts
    for command in () if fresh else COMMANDS:
        with contextlib.suppress(SystemExit):
            run_command(command, model, out)
    sys.stdout.flush()
    os.dup2(printed, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        begin = started if asked.pop("fresh") else forked
        sys.stdout.write(json.dumps(measured(begin, **asked)) + "\n")
        sys.stdout.flush()


def measured(begin, command, run, out):
    """Run a command and return its exit code, CPU time, memory and time; a hang is killed."""
    start = time.monotonic()
    number = begin(command, run, out)
    while True:
        ended, status, used = os.wait4(number, os.WNOHANG)
        wall = time.monotonic() - start
        if ended:
            break
        if wall > HANG:
            os.kill(number, signal.SIGKILL)
        time.sleep(0.005)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu": round(used.ru_utime + used.ru_stime, 2),
        "memory": used.ru_maxrss // 1024,
        "wall": round(wall, 1),
    }


# In the process that judges


class Commands:
    """The small process that runs commands and measures them."""

    def __init__(self, model, out, *, fresh=False):
        self._out, self._fresh = Path(out), fresh
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment["KLINIC_CACHE"] = str(self._out / "cache")
        if environment.pop("PYTHONDONTWRITEBYTECODE", None):  # an installed program has bytecode
            bytecode = str(Path(tempfile.gettempdir(), "klinic-bytecode"))
            environment.setdefault("PYTHONPYCACHEPREFIX", bytecode)
        self._process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--serve",
                str(model),
                str(out),
                *(["fresh"] if fresh else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, case, command, run):
        """Run a command on a folder and return how it ended."""
        before = tree(run)
        asked = {"command": command, "run": str(run), "out": str(self._out), "fresh": self._fresh}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        said = "".join(
            (self._out / name).read_text(errors="surrogateescape") for name in ("stdout", "stderr")
        )
        found["memory"] += 0 if self._fresh else SHARED
        seconds = SECONDS + (DRAWING if command in PAGES else 0.0)
        wrong = wrong_with(**found, said=said, seconds=seconds)
        if tree(run) != before:
            wrong = f"{wrong} the folder was changed"
        return Ending(case=case, command=command, said=said[-400:], wrong=wrong.strip(), **found)


def wrong_with(code, cpu, memory, wall, said, seconds=SECONDS):
    """Return what is wrong with the way a command ended; nothing where all is well."""
    faults = [
        (code not in CODES, f"exit {code}"),
        (cpu > seconds and cpu > allowed_seconds(seconds), f"{cpu} s"),
        (memory > MEMORY, f"{memory} MB"),
        (wall > HANG, "hangs"),
        (any(word in said for word in WRONG), "traceback"),
        (OBEYED.search(said) is not None, "control characters"),
        (code == 2 and not said.strip(), "no reason"),
    ]
    return ", ".join(words for is_wrong, words in faults if is_wrong)


def tree(folder):
    """Return what is in a folder, and in the one around it: a command writes nothing there."""
    found = {}
    for path in sorted(folder.parent.rglob("*")):
        if path.name in ("__pycache__",):
            continue
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def attack(num=None, *, seed=0, fresh=False, commands=COMMANDS, names=()):
    """Yield how every command ended on each case, or on a sample of them."""
    from healthy_run import healthy
    from run_folders import cases, make

    every = list(enumerate(cases().items()))
    if names:
        every = [one for one in every if any(re.search(name, one[1][0]) for name in names)]
    elif num is not None:
        every = random.Random(seed).sample(every, num)  # noqa: S311
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        out.mkdir()
        model = healthy(Path(scratch, "model"))
        with Commands(model, out, fresh=fresh) as running:
            for number, (case, spoil) in every:
                run = make(Path(scratch, "case"), number, spoil, model)
                for command in commands:
                    yield running.run(case, command, run)
                shutil.rmtree(Path(scratch, "case"))


def summary(endings):
    """Return counts and the largest figures by command."""
    found = {}
    for command in dict.fromkeys(ending.command for ending in endings):
        some = [ending for ending in endings if ending.command == command]
        found[command] = {
            "runs": len(some),
            "codes": dict(sorted(Counter(ending.code for ending in some).items())),
            "wrong": sum(bool(ending.wrong) for ending in some),
            "most cpu": max(ending.cpu for ending in some),
            "most memory": max(ending.memory for ending in some),
            "longest wall": max(ending.wall for ending in some),
        }
    return found


def main(words):
    """Attack and print what is wrong and a summary."""
    fresh = "--fresh" in words
    names = [word.removeprefix("--only=") for word in words if word.startswith("--only=")]
    numbers = [int(word) for word in words if word.isdecimal()]
    some = [word for word in words if word in COMMANDS] or COMMANDS
    endings = []
    for ending in attack(numbers[0] if numbers else None, fresh=fresh, names=names, commands=some):
        endings.append(ending)
        if ending.wrong or names:
            sys.stdout.write(json.dumps(asdict(ending)) + "\n")
            sys.stdout.flush()
    found = {"cases": len({ending.case for ending in endings}), **summary(endings)}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.exit(any(ending.wrong for ending in endings))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:5])
    elif sys.argv[1:2] == ["--inside"]:
        run_command(*sys.argv[2:5])
    else:
        main(sys.argv[1:])
