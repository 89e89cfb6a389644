"""Rewards that take the machine away from their run, once, in their third call.

Real faults: a disk is filled, a folder removed or made read-only, a limit of the process lowered.
What they do is undone from outside; `FAULT_ONCE` names the file that remembers it was done.
"""

import os
import resource
import shutil
import subprocess
from pathlib import Path

CALLS = [0]
RUN = Path("disk/run")


def is_time():
    CALLS[0] += 1
    done = Path(os.environ["FAULT_ONCE"])
    if CALLS[0] != 3 or done.exists():
        return False
    done.touch()
    return True


def good(completions):
    return [float(len(text) % 3) for text in completions]


def none(completions, **columns):
    return good(completions)


def disk_full(completions, **columns):
    if is_time():
        filler = os.open("disk/filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(filler, b"x" * 4096)
        except OSError:
            os.close(filler)
    return good(completions)


def read_only(completions, **columns):
    if is_time():
        subprocess.run(["mount", "--bind", RUN, RUN], check=True)  # noqa: S607 - of the system
        subprocess.run(["mount", "-o", "remount,bind,ro", RUN], check=True)  # noqa: S607
    return good(completions)


def deleted(completions, **columns):
    if is_time():
        shutil.rmtree(RUN)
    return good(completions)


def lower(limit, value):
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def no_memory(completions, **columns):
    if is_time():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        lower(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE"))
    return good(completions)


def no_descriptors(completions, **columns):
    if is_time():
        lower(resource.RLIMIT_NOFILE, len(list(Path("/proc/self/fd").iterdir())) - 1)
    return good(completions)


def file_size(completions, **columns):
    if is_time():
        lower(resource.RLIMIT_FSIZE, 4096)
    return good(completions)
