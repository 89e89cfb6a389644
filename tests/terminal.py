"""A command in a terminal of its own, as the terminal sees it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

INTO = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background has it ignored
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# all that a live view may send: colours, home, clear, its own screen, the cursor, no wrapping
ALLOWED = re.compile(r"\x1b\[(?:[0-9;]*m|H|2J|\?1049[hl]|\?25[hl]|\?7[hl])")
UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069]")


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, *command, columns=80, lines=24, env=None):
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(slave)
        told = {"TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})}
        rest = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", INTO, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**rest, **told},
        )
        self._slave = slave
        self.seen = b""

    @property
    def text(self):
        return self.seen.decode("utf-8", "replace")

    @property
    def settings_now(self):
        return termios.tcgetattr(self._slave)

    def resize(self, columns, lines):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys):
        os.write(self._master, keys)

    def read(self, seconds=0.1):
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            if select.select([self._master], [], [], left)[0]:
                self.seen += os.read(self._master, 65536)

    def until(self, words, seconds=30):
        limit = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < limit, f"{words!r} never came: {self.text[-3000:]!r}"
            self.read()

    def ended(self, seconds=30):
        limit = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < limit, self.text[-3000:]
            self.read()
        self.read()
        return self.process.returncode

    def stopped(self, seconds=30):
        """Wait until the command is stopped, and not ended."""
        limit = time.monotonic() + seconds
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < limit, self.text[-3000:]
            self.read()

    def painted(self):
        """Return the last screen that was painted, as lines without their colours."""
        frames = self.text.rpartition("\x1b[?1049l")[0] or self.text
        last = frames.split("\x1b[H")[-1]
        return ALLOWED.sub("", last).replace("\r", "").split("\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


def obeyed(text):
    """Return what a terminal would obey, or not show, of a text beyond what is allowed."""
    return UNSEEN.findall(ALLOWED.sub("", text))
