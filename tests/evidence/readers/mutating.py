"""Logs, dumps and records, damaged in every way, read by the command itself in one process.

`python tests/evidence/readers/mutating.py COUNT SEED` damages and reads that many and prints a
summary. It is a process of its own, as the command is: nothing here checks types but klinic.
"""

import contextlib
import copy
import faulthandler
import importlib.util
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from foreign_logs import record, write_all

LIMIT = 2.0  # seconds
MEMORY = 4 << 30  # bytes of addresses: what wants more is at fault
LARGEST = 1 << 24  # bytes of a file that is damaged further
HUGE = [10**400, -(10**400), 1e308, -1e308, 2**63, 2**53 + 1, 1e-320, 0, -1, 0.5]
ODD = [None, True, "", "text", "\ud800", "\x1b[2J\u202e", "NaN", [], {}, [[]], {"a": {"b": 1}}]
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]
CANARY = Path(tempfile.gettempdir()) / f"klinic-canary-{os.getpid()}"
"""A file that exists once a pickle was executed."""
TORCH = ("details of slime", "details of miles", "training batches of SkyRL")
RAW = [b"1e99999", b"9" * 5000, b"[" * 3000 + b"]" * 3000, b"[" * 200_000, b'"\\ud800"', b"NaN"]


def klinic_run(folder):
    """Write a run of klinic's own: two steps of records, metrics, facts and probes."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "report"))
    from made import record as made

    from klinic.evidence.run_facts import write_run_facts
    from klinic.evidence.store import write_record

    facts = {"eos_ids": [1], "sampling": {"temperature": 1.0}, "group_size": 2, "estimator": "k3"}
    write_run_facts(folder, {**facts, "vocabulary_size": 99, "policy": {"dtype": "fp32"}})
    for step in (1, 2):
        write_record(folder, made(step))
    lines = [{"step": step, "reward": 0.5, "kl": 0.1, "entropy": 1.0} for step in (1, 2)]
    answers = [{"step": 1, "probe": "rescore", "largest": 0.0}]
    for name, entries in (("metrics.jsonl", lines), ("probes.jsonl", answers)):
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / name).write_text(text)
    return folder


class Executed:
    """An object whose pickle creates the canary when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (str(CANARY),)


class Mutator:
    """Damages a copy of a log in one to three ways; the same seed damages it the same way."""

    def __init__(self, seed):
        self.chance = random.Random(seed)  # noqa: S311 - not a secret

    def damage(self, path):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for _ in range(self.chance.choice((1, 1, 1, 2, 3))):
            file = self.chance.choice(files)
            ways = [self.bytes, self.bytes, self.shape, self.place]
            if file.is_file() and not file.is_symlink() and file.stat().st_size < LARGEST:
                if file.suffix in (".json", ".jsonl"):
                    ways += [self.values] * 6
                if ".tfevents." in file.name or file.suffix in (".wandb", ".parquet", ".pt"):
                    ways += [self.with_checksum] * 4
                self.chance.choice(ways)(file)

    def bytes(self, file):
        """Cut, flip, repeat, take out or put in bytes."""
        data = bytearray(file.read_bytes())
        if not data:
            return
        start = self.chance.randrange(len(data))
        end = min(len(data), start + self.chance.randrange(1, 200))
        way = self.chance.randrange(6)
        if way == 0:
            del data[start:]
        elif way == 1:
            for _ in range(self.chance.randrange(1, 20)):
                data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        elif way == 2:
            data[start:start] = data[start:end] * self.chance.choice((1, 50))
        elif way == 3:
            del data[start:end]
        elif way == 4:
            data[start:end] = self.chance.randbytes(end - start)
        else:
            data[start:start] = self.chance.choice(RAW)
        file.write_bytes(data)

    def shape(self, file):
        """Write it in another encoding, empty, of nothing, or with other ends of lines."""
        data = file.read_bytes()
        text = data.decode("latin-1")
        file.write_bytes(
            self.chance.choice(
                (
                    text.encode("utf-16"),
                    text.encode("utf-32"),
                    b"\xef\xbb\xbf" + data,
                    data.replace(b"\n", b"\r\n"),
                    data.replace(b"\n", b"\r"),
                    data.replace(b"e", b"\xe9"),
                    b"",
                    bytes(len(data)),
                    self.chance.randbytes(300),
                    b"\n" * 1000,
                    data * 20,
                    pickle.dumps(Executed()),
                )
            )
        )

    def place(self, file):
        """Put something else in its place: a folder, a loop, a pipe, a device, a hole."""
        way = self.chance.randrange(8)
        if way == 0:
            with file.open("r+b") as opened:
                opened.truncate(1 << 30)
            return
        if way == 1:
            file.rename(file.with_name(self.chance.choice(("step_9", "a" * 200, ".x", "é\n"))))
            return
        file.unlink()
        if way == 2:
            file.mkdir()
        elif way == 3:
            file.symlink_to(file.name)
        elif way == 4:
            os.mkfifo(file)
        elif way == 5:
            file.symlink_to("/dev/zero")
        elif way == 6:
            file.symlink_to("/nowhere/at/all")
        else:
            file.symlink_to(file.parent)

    def values(self, file):
        """Swap a value somewhere in the JSON for one of another type or size."""
        lines = file.read_bytes().split(b"\n") if file.suffix == ".jsonl" else [file.read_bytes()]
        place = self.chance.randrange(len(lines))
        try:
            tree = json.loads(lines[place])
        except (ValueError, RecursionError):
            return
        text = json.dumps(self.swapped(tree)).encode()
        if self.chance.random() < 0.15:
            text = text.replace(b'"MARK"', self.chance.choice(RAW))
        lines[place] = text
        file.write_bytes(b"\n".join(lines))

    def swapped(self, tree):
        tree = copy.deepcopy(tree)
        holders = list(self._holders(tree))
        if not holders:
            return self._value()
        for _ in range(self.chance.choice((1, 1, 5))):
            holder = self.chance.choice(holders)
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                continue
            key = self.chance.choice(keys)
            if self.chance.random() < 0.2:
                del holder[key]
            elif isinstance(holder, dict) and self.chance.random() < 0.1:
                holder[self.chance.choice(("step", "loss", "\x1b[2J", ""))] = holder.pop(key)
            else:
                holder[key] = self._value()
        return tree

    def _holders(self, tree):
        if isinstance(tree, dict | list):
            yield tree
            for child in tree.values() if isinstance(tree, dict) else tree:
                yield from self._holders(child)

    def _value(self):
        return self.chance.choice((*HUGE, *ODD, *NOT_NUMBERS, "MARK"))

    def with_checksum(self, file):
        """Damage what a checksum guards, and give it the right one."""
        data = file.read_bytes()
        if ".tfevents." in file.name:
            (length,) = struct.unpack("<Q", data[:8])
            first = bytearray(data[12 : 12 + length])
            rest = data[16 + length :]
            file.write_bytes(record(self._flipped(first)) + rest)
        elif file.suffix == ".wandb":
            _, length, kind = struct.unpack("<IHB", data[7:14])
            body = self._flipped(bytearray(data[14 : 14 + length]))
            checksum = zlib.crc32(body, zlib.crc32(bytes([kind])))
            head = struct.pack("<IHB", checksum, len(body), kind)
            file.write_bytes(data[:7] + head + body + data[14 + length :])
        elif file.suffix == ".pt":
            self._torch_archive(file)
        else:
            self._parquet(file)

    def _torch_archive(self, file):
        """Damage one member of an archive of torch, or put a pickle with code in its place."""
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        pickles = [name for name in members if name.endswith("data.pkl")]
        name = self.chance.choice(pickles * 3 + list(members))
        code = self.chance.random() < 0.1
        members[name] = pickle.dumps(Executed(), 2) if code else self._flipped([*members[name]])
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    def _parquet(self, file):
        import hashlib

        body = self._flipped(bytearray(file.read_bytes()))
        file.write_bytes(body)
        manifest = file.with_name("complete.json")
        told = json.loads(manifest.read_bytes())
        told.pop("digest", None)
        told["parts"][0]["sha256"] = hashlib.sha256(body).hexdigest()
        manifest.write_text(json.dumps(told))

    def _flipped(self, data):
        for _ in range(self.chance.choice((1, 2, 10))):
            if data:
                data[self.chance.randrange(len(data))] = self.chance.randrange(256)
        return bytes(data)


def originals(folder):
    """Write one log of every format, and a run of klinic's own."""
    paths = write_all(folder, steps=25)
    roots = {name: path if path.is_dir() else path.parent for name, path in paths.items()}
    for name in ("trl_lines", "verl", "openrlhf"):  # files beside one another: each alone
        roots[name] = paths[name]
    return {
        **roots,
        **dumps_and_tables(folder),
        **torch_dumps(folder),
        "records": klinic_run(folder / "records-of-klinic"),
    }


def dumps_and_tables(folder):
    """Write a batch dump of every trainer, and a table or text of every kind."""
    from foreign_dumps import WRITERS
    from foreign_logs import healthy, trl_entries
    from foreign_texts import CONSOLES, EXACT

    paths = {}
    for number, (name, write) in enumerate(WRITERS.items()):
        paths[name] = write(folder / f"dump-{number}", steps=2, length=12)
    entries = trl_entries(healthy(30))
    for number, (name, write) in enumerate({**EXACT, **CONSOLES}.items()):
        place = folder / f"table-{number}"
        place.mkdir()
        paths[name] = write(place, entries)
    return paths


def torch_dumps(folder):
    """Write a dump of every trainer that uses torch's file format; none where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        return {}
    sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))
    from test_torch_dumps import WRITERS

    return {
        name: write(folder / f"torch-{number}", steps=2, length=12)
        for number, (name, write) in enumerate(zip(TORCH, WRITERS.values(), strict=True))
    }


def is_converted(name, number):
    """Whether a case is converted rather than diagnosed: dumps of torch are only converted."""
    return number % 10 == 9 or (name in TORCH and number % 10 > 0)


def case(kinds, number, folder):
    """Return the path of the damaged log with a number; also which kind it is."""
    mutator = Mutator(number)
    name = mutator.chance.choice(sorted(kinds))
    source = kinds[name]
    path = folder / source.name
    if source.is_dir():
        shutil.copytree(source, path)
    else:
        shutil.copy(source, path)
    with contextlib.suppress(
        *(FileNotFoundError, struct.error, ValueError, KeyError, OSError),
        *(zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, TypeError),
    ):
        mutator.damage(path)
    return name, path


def told(path, *, as_json, target=None):
    """Run the command in this process; return its exit code, what it printed, and seconds.

    With a `target`, the run is converted to a folder there instead of diagnosed.
    """
    from klinic.cli import main

    out, err = io.StringIO(), io.StringIO()
    words = ["diagnose", path] if target is None else ["convert", path, target]
    sys.argv = ["klinic", *map(str, words), *(["--json"] if as_json else [])]
    start = time.process_time()  # others use the machine
    signal.alarm(60)  # the end, should it hang
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    signal.alarm(0)
    return code, out.getvalue(), err.getvalue(), time.process_time() - start


def wrong_with(code, out, err, *, as_json):
    """Return what is wrong with an answer, or nothing."""
    if code not in (0, 1, 2):
        return f"exit code {code}: {err[:300]}"
    if "Traceback" in err:
        return f"a traceback: {err[:300]}"
    unread = as_json and code == 2 and bool(out) and json.loads(out)["verdict"] == "unread"
    if code == 2 and ("Error: " not in err or (out and not unread)):
        return f"exit code 2 without a reason alone: {err[:200]!r} {out[:200]!r}"
    if code != 2 and as_json:
        json.loads(out, parse_constant=lambda name: 1 / 0)
    if any(c in out + err for c in "\x1b\u202e") and not as_json:
        return "a terminal would obey it"
    return ""


def main_of(count, seed):
    """Damage and diagnose so many; return a summary."""
    codes, kinds_seen, slowest, faults = {}, {}, (0.0, -1, ""), []
    with tempfile.TemporaryDirectory() as place:
        kinds = originals(Path(place, "originals"))
        for number in range(seed, seed + count):
            folder = Path(place, "case")
            folder.mkdir()
            name, path = case(kinds, number, folder)
            as_json = number % 2 == 0
            target = folder / "converted" if is_converted(name, number) else None
            code, out, err, seconds = told(path, as_json=as_json, target=target)
            if seconds > LIMIT:  # once more: others use the machine
                shutil.rmtree(folder / "converted", ignore_errors=True)
                code, out, err, seconds = told(path, as_json=as_json, target=target)
            wrong = wrong_with(code, out, err, as_json=as_json)
            wrong = wrong or (f"{seconds:.1f} s" if seconds > LIMIT else "")
            wrong = wrong or ("code was executed" if CANARY.exists() else "")
            if wrong:
                faults.append(f"{number} {name}: {wrong}")
            codes[code] = codes.get(code, 0) + 1
            kinds_seen[name] = kinds_seen.get(name, 0) + 1
            slowest = max(slowest, (seconds, number, name))
            shutil.rmtree(folder)
    return {
        "cases": count,
        "codes": codes,
        "kinds": kinds_seen,
        "slowest": slowest,
        "faults": faults,
    }


def hanging(*_):
    """Say where it hangs."""
    sys.stderr = sys.__stderr__
    faulthandler.dump_traceback()
    sys.__stderr__.write(f"hangs: {sys.argv}\n")
    sys.__stderr__.flush()
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, hanging)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found = main_of(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["faults"] else 0)
