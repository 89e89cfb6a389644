"""Seeded misuse of the command line: `python -m hostile.misuse FIRST LAST` prints what came of it.

Each case is the command's own `main` in a fork of this process, with limits of its own: no shell,
no reader of its output, nothing to read. One JSON object a line: the case and how it ended.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import typer

from hostile.healthy_run import healthy
from klinic.cli import app as command_line

WALL = 90.0  # seconds until a case counts as hanging, however busy the machine is
CPU = 12  # seconds of work
WATCHED = 1.0  # seconds until `klinic watch` gets the Ctrl-C that ends it

WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        ".",
        "..",
        "missing",
        "folder",
        "empty",
        "binary",
        "pipe",
        "loop",
        "null",
    ),
    *(
        "ünïcode",
        "日本語",
        "line\nbreak",
        "esc\x1b[2J",
        "\udcff\udcfe",
        "a" * 300,
        "b/" * 2500 + "c",
    ),
    *(
        "folder/missing/deep",
        "empty/inside",
        "/dev/null",
        "/dev/full",
        "/proc/nothing",
        "~nobody/x",
    ),
    *(
        "file.py:",
        ":function",
        "a:b:c",
        "empty:f",
        "binary.py:f",
        "broken.py:f",
        "http://[",
        "%s%n",
    ),
    *(
        "recipe.yaml",
        "run",
        "run/metrics.jsonl",
        "bad.yaml",
        "deep.yaml",
        "bomb.yaml",
        "$HOME",
        "*",
    ),
)
NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "1e400",
        "-1e400",
        "nan",
        "inf",
        "1e-400",
        "0x10",
        "\uff11\uff12",
        "10**9",
        "1_0",
    ),
    *("9" * 400, "1.5", "true", "null", "", " ", "1e9", "-0", "+1", "1,5", "65536", "'1'"),
)
SETTINGS = (
    *(
        "kl.coef=-1",
        "kl.coef=nan",
        "kl.coef=[",
        "kl.coef=",
        "=1",
        "no.such.key=1",
        "loop=3",
        "a=b=c",
    ),
    *("loop.max_steps=0", "loop.group_size=1", "output.dir=pipe", "output.dir=empty", "seed=1e400"),
    *(
        "model=missing",
        "model={a: 1",
        "rewards=[1]",
        "rewards=pipe",
        "kl: 1",
        "--kl-beta=x",
        "!!python",
    ),
    *(
        "output.dir=" + "a" * 5000,
        "rewards=[ünïcode:f]",
        "loop.max_steps=" + "9" * 400,
        "seed=\x1b[2J",
    ),
    *("&a=*a", "data.path=pipe", "data.path=binary", "data=missing.jsonl", "rewards=file:///x"),
)
UNKNOWN = (
    "--nope",
    "-x",
    "--help=1",
    "--json=3",
    "--out",
    "--",
    "--=",
    "---",
    "--\udcff",
    "--日本",
)
NEARLY_RIGHT = (
    *(["diagnose", "run"], ["diagnose", "run", "--json"], ["diagnose", "run", "--prove"]),
    *(["diagnose", "run/metrics.jsonl"], ["report", "run"], ["report", "run", "run"]),
    *(["report", "run", "--out", "page.html"], ["report", "run", "--out", "pipe"]),
    *(["report", "run", "--terminal"], ["report", "run", "--terminal", "--step", "2"]),
    *(["watch", "run"], ["watch", "run", "--web"], ["watch", "run", "--web", "--port", "0"]),
    *(["explain", "H01"], ["explain", "--all"], ["demo", "--list"], ["verify", "broken.py:f"]),
    *(["train", "recipe.yaml", "--dry-run"], ["train", "recipe.yaml", "--resume", "seed=x"]),
    ["train", "recipe.yaml", "--dry-run", "--gpus", "2", "--gpu-memory", "80", "--json"],
    *(["eval", "run", "--num", "1"], ["eval", "run", "--prompts", "empty", "--json"]),
    *(["export", "run", "--to", "model"], ["export", "folder", "--to", "pipe", "--merge"]),
    *(["check", "recipe.yaml", "seed=x"], ["check", "--trl", "broken.py:f"]),
    ["ablate", "recipe.yaml", "--vary", "kl.coef=0,x", "--seeds", "1", "--out", "pipe"],
    *(["ablate", "run", "--plot"], ["ablate", "folder", "--plot", "--out", "empty"]),
)
# which would do what they are asked, given the chance
TRAINS = {
    "train",
    "check",
    "demo",
    "ablate",
}
COMMANDS = typer.main.get_command(command_line.app)


def case(seed):
    """Return the arguments of a case."""
    draw = random.Random(seed)  # noqa: S311 - the same for everybody
    return nearly_right(draw) if seed % 2 else at_random(draw)


def at_random(draw):
    """Return a command with options and words that nobody would write."""
    name = draw.choice([*COMMANDS.commands, *COMMANDS.commands, draw.choice(WORDS)])
    if name not in COMMANDS.commands:
        return [name, *draw.sample(WORDS, draw.randint(0, 2))]
    arguments = []
    for parameter in COMMANDS.commands[name].params:
        if parameter.param_type_name == "argument":
            arguments += draw.choices(WORDS, k=draw.choice((0, 1, 1, 1, 2, 3)))
        elif draw.random() < 0.4:
            arguments += option(parameter, draw)
    if draw.random() < 0.3:
        arguments.insert(draw.randint(0, len(arguments)), draw.choice(UNKNOWN))
    if name in TRAINS:
        arguments += draw.sample(SETTINGS, draw.randint(1, 2))
    if name == "verify" and not set(arguments) & set(WORDS):
        arguments.append("missing.py:f")
    return [name, *arguments]


def nearly_right(draw):
    """Return a command that would work, with one thing wrong."""
    words = list(draw.choice(NEARLY_RIGHT))
    odd = draw.choice(draw.choice((WORDS, WORDS, NUMBERS, SETTINGS)))
    place = draw.randint(1, len(words))
    kept = words[0] in TRAINS and "--dry-run" not in words  # its mistake keeps it from training
    if kept or place == len(words) or draw.random() < 0.2:
        return [*words[:place], odd, *words[place:]]
    return [*words[:place], odd, *words[place + 1 :]]


def option(parameter, draw):
    flag = draw.choice(parameter.opts)
    times = draw.choice((1, 1, 1, 2))
    if getattr(parameter, "is_flag", False):
        return [flag] * times
    given = [
        [flag, draw.choice(draw.choice((NUMBERS, WORDS)))] if draw.random() < 0.9 else [flag]
        for _ in range(times)
    ]
    return [word for words in given for word in words]


def furnish(folder):
    """Put what the words name into a folder."""
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "binary.py").write_bytes(bytes(range(256)) * 40)
    (folder / "broken.py").write_text("raise RuntimeError('when imported')")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "null").symlink_to("/dev/null")
    (folder / "ünïcode").write_text("text")
    (folder / "recipe.yaml").write_text("{model: tiny, task: arithmetic, loop: {max_steps: 1}}")
    (folder / "bad.yaml").write_text("model: [tiny\n")
    (folder / "deep.yaml").write_text("[" * 50_000)
    (folder / "bomb.yaml").write_text("a: &a [x]\n" + "b: [*a, *a]\n" * 1000)
    healthy(folder / "run")


def run(arguments, folder):
    """Return how a case ended: exit code, what it said, seconds of work and of the clock."""
    printed = folder / "printed"
    printed.unlink(missing_ok=True)
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        inside(arguments, folder, printed)
    ended, interrupted = 0, arguments[0] != "watch"
    while not ended and time.monotonic() < begun + WALL:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if not (ended or interrupted) and time.monotonic() > begun + WATCHED:
            interrupted = True
            os.kill(pid, signal.SIGINT)
        time.sleep(0.005)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
    return {
        "arguments": arguments,
        "code": os.waitstatus_to_exitcode(status),
        "said": printed.read_bytes()[-1500:].decode(errors="replace"),
        "work": used.ru_utime + used.ru_stime,
        "seconds": time.monotonic() - begun,
    }


def inside(arguments, folder, printed):
    """Be the command."""
    code = 99
    try:
        os.chdir(folder)
        nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(printed, os.O_WRONLY | os.O_CREAT)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 1))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["klinic", *arguments]
        command_line.main()
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException as error:  # as Python itself would show it
        os.write(2, f"Traceback {type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main():
    os.environ |= {"KLINIC_SUPERVISED": "0", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    first, last = map(int, sys.argv[1:])
    load()
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as name:
            furnish(Path(name))
            sys.stdout.write(json.dumps({"seed": seed, **run(case(seed), Path(name))}) + "\n")
            sys.stdout.flush()


def load():
    """Import once what most commands import, so that a fork takes milliseconds."""
    for name in ("klinic.report.reading", "klinic.report.page", "klinic.recipe.loading", "numpy",
                 "klinic.verify.proof", "klinic.training.train",
                 "klinic.training.compare"):  # fmt: skip
        with contextlib.suppress(ImportError):
            __import__(name)


if __name__ == "__main__":
    main()
