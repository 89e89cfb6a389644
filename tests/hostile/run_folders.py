"""Run folders that a stranger damaged on purpose, each by one named function.

`cases()` returns every case by name; each spoils a copy of a healthy run of three steps. The same
seed spoils the same bytes.
"""

import json
import os
import random
import shutil
import socket
from functools import partial
from pathlib import Path

from healthy_run import (
    DIAGNOSIS,
    EVENT,
    FACTS,
    MANIFEST,
    METRICS,
    PART,
    PROBE,
    RECOVERY,
    RUN,
    STEP,
    TIMES,
    seal,
)
from parquet_bombs import BOMBS
from wrong_columns import COLUMNS, spoil_columns, text_that_is_no_text

JSON_FILES = ("run.json", "tokens.json", "diagnosis.json", "recovery.json", MANIFEST)
JOURNALS = ("metrics.jsonl", "events.jsonl", "probes.jsonl")
FILES = (*JSON_FILES, *JOURNALS, "recipe.yaml", ".lock", PART)
NUM_FLIPPED, NUM_SPOILT = 40, 110
TERABYTE = 200 << 30

HUGE = (10**400, -(10**400), 10**30, 2**63, -1, 1e308, -1e308, 0, True)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
ODD = (None, "", "text", "\x1b[2J\u202e\x9b2J", "\ud800", [], {}, [[]], {"a": {"b": 1}}, "9" * 5000)
VALUES = (*HUGE, *NOT_FINITE, *ODD)
RAW = (
    *(b"1e99999", b"9" * 5000, b"[" * 2000 + b"]" * 2000, b'{"step": 1,' * 500),
    *(b'"\\ud800"', b"NaN", b"\xff\xfe\x00", b"\x00" * 70_000, b"-" * 100),
)
NAMES = (
    *("a\x1b[2Jb", "a\nb\rc", "\u202eabc", "[red]x[/red]", "'\"`$(id)", "$x_{", "%s%n"),
    *("<script>alert(1)<", "--help", "a" * 200, "\udcff"),
)


# What stands in the place of a file


def pipe(path):
    os.mkfifo(path)


def unix_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has room for 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def link(path, target):
    path.symlink_to(target)


def folder_instead(path):
    path.mkdir()


def folder_of_many(path):
    path.mkdir()
    for number in range(500):
        (path / f"step={number}").touch()


def sparse(path, head=b"", end=b"", size=TERABYTE):
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        if end:
            file.seek(size)
            file.write(end)


def holds(path, content):
    path.write_bytes(content)


INSTEAD = {
    "pipe": pipe,
    "socket": unix_socket,
    "endless zeros": partial(link, target="/dev/zero"),
    "endless noise": partial(link, target="/dev/urandom"),
    "full device": partial(link, target="/dev/full"),
    "terminal": partial(link, target="/dev/tty"),
    "kernel log": partial(link, target="/proc/kmsg"),
    "memory of itself": partial(link, target="/proc/self/mem"),
    "loop": partial(link, target="loop-of-links"),
    "nowhere": partial(link, target="/nonexistent/file"),
    "folder": folder_instead,
    "folder of many": folder_of_many,
    "sparse": sparse,
    "sparse 6 MB": partial(sparse, size=6 << 20),
    "sparse with a beginning": partial(sparse, head=b'{"schema": 1, "step": 1}\n'),
    "sparse with an end": partial(sparse, end=b"PAR1\n"),
    "empty": partial(holds, content=b""),
    "newlines": partial(holds, content=b"\n" * 100_000),
    "zeros": partial(holds, content=bytes(3_000_000)),
    "noise": partial(
        holds,
        content=random.Random(7).randbytes(20_000),  # noqa: S311
    ),
    "deep lists": partial(holds, content=b"[" * 200_000 + b"\n"),
    "deep objects": partial(holds, content=b'{"step": 1, "a":' * 20_000 + b"1" + b"}" * 20_000),
    "many lists": partial(holds, content=b'{"a": [' + b"[]," * 2_000_000 + b"[]]}\n"),
    "a long line": partial(holds, content=b'{"step": 1, "a": "' + b"x" * 7_000_000 + b'"}\n'),
    "a list": partial(holds, content=b"[1, 2]\n"),
    "a number": partial(holds, content=b"1e999\n"),
    "long numbers": partial(
        holds, content=b'{"schema": 1, "step": ' + b"9" * 4000 + b', "kl": ' + b"9" * 400 + b"}\n"
    ),
    "longer numbers": partial(holds, content=b'{"schema": ' + b"9" * 5000 + b"}\n"),
    "surrogates": partial(
        holds,
        content=b'{"schema": 1, "step": 1, "event": "\\ud800", "says": "\\u001b[2J\\u202e"}\n',
    ),
    "UTF-16": partial(holds, content='{"schema": 1, "step": 1}\n'.encode("utf-16")),
    "anchors": partial(
        holds,
        content=b"a: &a [x, x, x]\n"
        + b"".join(b"%c: &%c [*%c, *%c, *%c]\n" % (n + 1, n + 1, n, n, n) for n in range(97, 115)),
    ),
}


def put_instead(run, name, what):
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    INSTEAD[what](run / name)
    if what == "loop":
        (run / name).parent.joinpath("loop-of-links").symlink_to((run / name).name)


# Values of the wrong kind, in every field


def spoil_json(run, name, key, value):
    values = json.loads((run / name).read_text())
    values[key] = value
    values.pop("digest", None)
    (run / name).write_text(json.dumps(values))


def spoil_part_of(run, name, key, value):
    values = json.loads((run / "run.json").read_text())
    values[name] = {**values[name], key: value}
    (run / "run.json").write_text(json.dumps(values))


def spoil_line(run, name, key, value):
    """Put a wrong value into the last line of a journal, and again into one behind it."""
    lines = (run / name).read_text().splitlines()
    entry = {**json.loads(lines[-1]), key: value}
    text = "".join(f"{line}\n" for line in (*lines, json.dumps(entry)))
    (run / name).write_text(text, errors="surrogatepass")


def lose_key(run, name, key):
    entry = {k: v for k, v in {**EVENT, **PROBE, **METRICS, "step": 2}.items() if k != key}
    (run / name).write_text(json.dumps(entry) + "\n")


def splice(run, name, seed):
    """Overwrite a place of a file with bytes that a parser trips over."""
    rng = random.Random(seed)  # noqa: S311
    data = bytearray((run / name).read_bytes())
    place = rng.randrange(len(data) or 1)
    data[place : place + rng.choice((0, 1, 20))] = rng.choice(RAW)
    (run / name).write_bytes(data)


def flip(run, seed):
    """Flip bytes of a part, mostly of its footer; the manifest agrees."""
    rng = random.Random(seed)  # noqa: S311
    data = bytearray((run / PART).read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        first = 0 if rng.random() < 0.3 else max(0, len(data) - 3000)
        place = rng.randrange(first, len(data))
        data[place] = rng.choice((0, 255, 127, 128, data[place] ^ 1 << rng.randrange(8)))
    (run / PART).write_bytes(data)
    seal(run)


# Manifests, folders and numbers


def many_parts(run):
    parts = [{"file": f"part-{i:05d}.parquet", "rows": 1, "sha256": ""} for i in range(20_000)]
    seal(run, parts=parts)


def one_part_many_times(run):
    entry = json.loads((run / MANIFEST).read_text())["parts"][0]
    seal(run, parts=[entry] * 20_000)


def one_file_by_many_names(run):
    entry = json.loads((run / MANIFEST).read_text())["parts"][0]
    names = [f"part-{i:05d}.parquet" for i in range(1, 3000)]
    for name in names:
        (run / STEP / name).symlink_to("part-00000.parquet")
    seal(run, parts=[entry, *({**entry, "file": name} for name in names)])


def part_elsewhere(run):
    entry = json.loads((run / MANIFEST).read_text())["parts"][0]
    seal(run, parts=[{**entry, "file": "../../../../../../etc/passwd"}])


def records_loop(run):
    shutil.rmtree(run / "records")
    (run / "records").symlink_to(".")


def records_everywhere(run):
    shutil.rmtree(run / "records")
    (run / "records").symlink_to("/proc")


def records_a_file(run):
    shutil.rmtree(run / "records")
    (run / "records").write_text("x")


def step_loop(run):
    (run / "records/step=000009").symlink_to("step=000009")


def step_named(run, name):
    (run / "records" / name).mkdir()
    (run / "records" / name / "complete.json").write_text("{}")


def huge_step(run):
    """Write a step whose number has 19 digits, in a folder of the right name."""
    digits = 9_000_000_000_000_000_000
    shutil.copytree(run / STEP, run / f"records/step={digits}")
    manifest = json.loads((run / f"records/step={digits}/complete.json").read_text())
    manifest.pop("digest", None)
    manifest["step"] = digits
    (run / f"records/step={digits}/complete.json").write_text(json.dumps(manifest))


def many_facts(run):
    seal(run, facts={f"fact {i}": i for i in range(50_000)})


def long_fact(run):
    seal(run, facts={"a" * 100_000: 1, "learner_version": "\x1b[2J", "kl_coef": 10**400})


def all_links(run):
    """Put every file behind a link into a folder beside it, as a content store does."""
    store = run.with_name("store")
    for number, path in enumerate([p for p in run.rglob("*") if p.is_file()]):
        store.mkdir(exist_ok=True)
        moved = store / str(number)
        path.rename(moved)
        path.symlink_to(moved)


def many_events(run):
    line = json.dumps({**EVENT, "says": "x" * 300}) + "\n"
    (run / "events.jsonl").write_text(line * 40_000)


def many_metrics_of_one_step(run):
    line = json.dumps({"step": 3, **METRICS, **TIMES}) + "\n"
    (run / "metrics.jsonl").write_text(line * 40_000)


def many_steps_of_metrics(run):
    lines = (json.dumps({"step": s, **METRICS, **TIMES}) for s in range(1, 40_001))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def many_names_of_metrics(run):
    lines = ({"step": s, **{f"m{s}-{i}": 0.5 for i in range(300)}} for s in range(300))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def many_rewards(run):
    line = {"step": 3, **{f"rewards/{i}/mean": i for i in range(10_000)}}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def far_apart(run):
    lines = [{"step": step, **METRICS} for step in (1, 10**9, 2**63, 10**18, -5, 10**300)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{**EVENT, "step": step} for step in (10**400, -(10**30), 10**18, 2**62)]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))


def many_tokens_named(run):
    (run / "tokens.json").write_text(json.dumps({str(i): "x" for i in range(700_000)}))


def long_texts(run):
    (run / "tokens.json").write_text(json.dumps({str(i): "<b>" + "x" * 200_000 for i in range(30)}))


def many_cuts(run):
    cuts = [{"first": -(10**400), "last": 10**400, "factor": 1e308}] * 20_000
    (run / "recovery.json").write_text(json.dumps({**RECOVERY, "cuts": cuts}))


def long_recipe(run):
    (run / "recipe.yaml").write_text("seed: " + "word " * 180_000)


def recipe_of_many_keys(run):
    (run / "recipe.yaml").write_text("".join(f"k{i}: {i}\n" for i in range(60_000)))


MORE = (
    *(many_parts, one_part_many_times, one_file_by_many_names, part_elsewhere, records_loop),
    *(records_everywhere, records_a_file, step_loop, huge_step, many_facts, long_fact, all_links),
    *(many_events, many_metrics_of_one_step, many_steps_of_metrics, many_names_of_metrics),
    *(many_rewards, far_apart, many_tokens_named, long_texts, many_cuts, long_recipe),
    *(recipe_of_many_keys, text_that_is_no_text),
)
STEP_NAMES = ("step=" + "9" * 200, "step=\u0663\u0663\u0663", "step=7", "step=-00001", "step=")


def fields():
    """Return what spoils a field, by the name of the field: every field of every file."""
    whole = {
        "run.json": RUN,
        "diagnosis.json": DIAGNOSIS,
        "recovery.json": RECOVERY,
        MANIFEST: ("schema", "step", "parts", "facts"),
        "tokens.json": ("1", "x", "-5"),
    }
    lines = {
        "metrics.jsonl": ("step", *METRICS, *TIMES, "kl_target", "eval/accuracy"),
        "events.jsonl": EVENT,
        "probes.jsonl": PROBE,
    }
    inner = {key: values for key, values in RUN.items() if isinstance(values, dict)}
    return {
        **{f"fact {key}": partial(spoil_fact, key=key) for key in FACTS},
        **_each(spoil_json, whole),
        **_each(spoil_line, lines),
        **_each(spoil_part_of, inner),
    }


def _each(spoil, keys_of):
    return {
        f"{name} {key}": partial(spoil, name=name, key=key)
        for name, keys in keys_of.items()
        for key in keys
    }


def spoil_fact(run, key, value):
    seal(run, facts={**FACTS, key: value})


def cases():
    """Return every case by name: what spoils a healthy folder."""
    return {
        **{
            f"{what} for {name}": partial(put_instead, name=name, what=what)
            for name in FILES
            for what in INSTEAD
        },
        **{spoil.__name__.replace("_", " "): spoil for spoil in (*BOMBS, *MORE)},
        **{f"columns: {name}": partial(spoil_columns, name=name) for name in COLUMNS},
        **{f"folder {name[:12]}": partial(step_named, name=name) for name in STEP_NAMES},
        **{
            f"{name} without {key}": partial(lose_key, name=name, key=key)
            for name in JOURNALS
            for key in ("step", "event", "says", "probe", "kl")
        },
        **{f"flipped bytes {seed}": partial(flip, seed=seed) for seed in range(NUM_FLIPPED)},
        **_drawn(random.Random(2_606)),  # noqa: S311
    }


def _drawn(rng):
    """Return wrong values in every field, and wrong bytes at any place."""
    found = {}
    every = list(fields().items())
    for number in range(NUM_SPOILT):
        name, spoil = every[number % len(every)]
        value = rng.choice(VALUES)
        found[f"{name} is {repr(value)[:20]} ({number})"] = partial(spoil, value=value)
    for number in range(NUM_SPOILT // 4):
        name = rng.choice((*JSON_FILES, *JOURNALS, "recipe.yaml"))
        found[f"bytes in {name} ({number})"] = partial(splice, name=name, seed=number)
    return found


def folder_name(number):
    """Return how a case's folder is called: some names are hostile themselves."""
    return f"run {NAMES[number % len(NAMES)]}" if number % 5 == 0 else "run"


def make(folder, number, spoil, model):
    """Write a case into a folder of its own, from a healthy model; return the run's folder."""
    run = folder / folder_name(number)
    shutil.copytree(model, run)
    spoil(run)
    return run
