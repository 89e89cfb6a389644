"""Reward functions that do to their process what no reward should; each from its third call on.

Tests run them in processes of their own: here, or inside of `klinic train`.
"""

import os
import signal
import sys
import tempfile
import threading
import time

CALLS = [0]


def good(completions):
    return [float(len(text) % 3) for text in completions]


def well_behaved(completions, **columns):
    return good(completions)


def is_third():
    """Count calls: the first ones are well behaved, so that a run has begun."""
    CALLS[0] += 1
    return CALLS[0] >= 3


def hang(completions, **columns):
    while True:
        time.sleep(1)


def fork_return(completions, **columns):
    if is_third() and CALLS[0] == 3:
        os.fork()
    return good(completions)


def fork_leave(completions, **columns):
    if os.fork() == 0:
        os.setsid()
        time.sleep(40)
        os._exit(0)
    return good(completions)


def exit0(completions, **columns):
    if is_third():
        os._exit(0)
    return good(completions)


def exit3(completions, **columns):
    if is_third():
        os._exit(3)
    return good(completions)


def exit_in_c(completions, **columns):
    if is_third():
        import ctypes

        ctypes.CDLL(None)._exit(0)
    return good(completions)


def sysexit(completions, **columns):
    sys.exit(0)


class NoException(BaseException):
    pass


def no_exception(completions, **columns):
    raise NoException("neither Exception nor SystemExit")


def leak(completions, **columns):
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm") as sizes:  # noqa: PTH123 - as little as can be
        used = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), hard))
    try:
        held = []
        while True:
            held.append(bytearray(20 << 20))
    finally:
        held = None
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def print100(completions, **columns):
    if CALLS[0] == 0:
        CALLS[0] = 1
        for _ in range(100):
            sys.stdout.write("A" * (1 << 20))
        sys.stdout.flush()
    return good(completions)


def chdir(completions, **columns):
    os.chdir(tempfile.gettempdir())
    return good(completions)


def torchpatch(completions, **columns):
    import torch

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_device("meta")
    return good(completions)


def torchpatch2(completions, **columns):
    import torch

    torch.Tensor.backward = lambda *_, **__: None
    torch.optim.AdamW.step = lambda *_, **__: None
    return good(completions)


def closefds(completions, **columns):
    os.closerange(3, 256)
    return good(completions)


def close_stdout(completions, **columns):
    os.close(1)
    return good(completions)


def sigs(completions, **columns):
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return good(completions)


def esc(completions, **columns):
    raise ValueError("\x1b[2J\x1b]0;own\x07 bad " + completions[0])


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def strs(completions, **columns):
    return ["1"] * len(completions)


def short(completions, **columns):
    return [1.0]


def gen(completions, **columns):
    return (1.0 for _ in completions)


def endless(completions, **columns):
    while True:
        yield 1.0


def huge(completions, **columns):
    return [10**400] * len(completions)


def huge_list(completions, **columns):
    return range(10**12)


def digits(completions, **columns):
    return {"reward": 10**5000}


def cplx(completions, **columns):
    return [1j] * len(completions)


def npbig(completions, **columns):
    import numpy as np

    return np.ones((len(completions), 2))


def rec(completions, **columns):
    return rec(completions)


def stdin(completions, **columns):
    input()
    return good(completions)


def stdoutclose(completions, **columns):
    sys.stdout.close()
    return good(completions)


def thread(completions, **columns):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return good(completions)


def badmsg(completions, **columns):
    class NoTextError(Exception):
        def __str__(self):
            raise RuntimeError("no")

        __repr__ = __str__

    raise NoTextError


def badvalue(completions, **columns):
    class NoRepr:
        def __repr__(self):
            raise RuntimeError("no")

    return [NoRepr()] * len(completions)


def longmsg(completions, **columns):
    raise ValueError("x" * (50 << 20))


async def async_exit(completions, **columns):
    os._exit(0)


async def async_cancel(completions, **columns):
    import asyncio

    raise asyncio.CancelledError


async def async_chdir(completions, **columns):
    os.chdir(tempfile.gettempdir())
    return good(completions)
