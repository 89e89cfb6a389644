"""Run folders that a stranger damaged on purpose, each by one named function.

`cases()` returns every case by name; each spoils a copy of a healthy run of three steps. The same
seed spoils the same bytes.
"""

import hashlib
import json
import os
import random
import shutil
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import write_run_facts, write_tokens
from klinic.evidence.store import write_record

STEP = "records/step=000002"
PART, MANIFEST = f"{STEP}/part-00000.parquet", f"{STEP}/complete.json"
JSON_FILES = ("run.json", "tokens.json", "diagnosis.json", "recovery.json", MANIFEST)
JOURNALS = ("metrics.jsonl", "events.jsonl", "probes.jsonl")
FILES = (*JSON_FILES, *JOURNALS, "recipe.yaml", ".lock", PART)
NUM_FLIPPED, NUM_SPOILT = 40, 110
TERABYTE = 200 << 30

RUN = {
    "eos_ids": [1],
    "declared_eos_ids": [1],
    "pad_id": 0,
    "logp_old": "scored",
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8},
    "logprob_mode": "processed",
    "vocabulary_size": 30,
    "policy": {"name": "tiny", "digest": "0", "dtype": "float32", "num_experts": 0},
    "reference": {"kind": "copy", "digest": "0", "wanted": "start", "sync_every": None},
    "sampler": {"kind": "torch", "dtype": "float32", "max_version_lag": 0},
    "estimator": "k3",
    "group_size": 2,
    "seed": 3,
}
METRICS = {"reward": 0.5, "kl": 0.1, "loss": 0.0, "entropy": 1.0, "grad_norm": 1.0, "kl_coef": 0.1}
TIMES = {"time/sample": 1.0, "time/reward": 0.1, "time/learn": 2.0, "num_tokens": 12}
EVENT = {"step": 2, "event": "trouble", "act": "skip", "says": "A batch was left out."}
PROBE = {"step": 1, "probe": "rescore", "largest": 0.0}
DIAGNOSIS = {"cause": "stale-sampler", "fix": "Sync it.", "first_step": 2, "findings": []}
RECOVERY = {
    "skipped": [4],
    "known": [],
    "cuts": [{"first": 2, "last": 3, "factor": 0.5}],
    "num_cuts": 1,
    "tried": None,
    "front": 0,
    "tries": 0,
    "last_step": 0,
    "consecutive": 0,
    "back_to": None,
}
FACTS = {"kl_coef": 0.1, "learner_version": 1, "learning_rate": 1e-5, "grad_norm": 1.0}
RECIPE = "seed: 3\nloop:\n  max_steps: 5\n"

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


def record(step, lengths=(3, 5, 4, 2)):
    """Return a step of a run in which nothing is wrong."""
    rng = np.random.default_rng(step)
    num = sum(lengths)
    logp = -np.abs(rng.normal(size=num)).astype(np.float32)
    return StepRecord(
        step=step,
        row_offsets=np.cumsum([0, *lengths]),
        group=np.arange(len(lengths)) // 2,
        prompt_offsets=np.arange(len(lengths) + 1) * 2,
        prompt_ids=rng.integers(0, 30, len(lengths) * 2),
        reward=rng.normal(size=len(lengths)),
        reward_parts={"legal": rng.normal(size=len(lengths))},
        finish_reason=np.array(["stop"] * len(lengths)),
        token_ids=rng.integers(0, 30, num),
        loss_mask=np.ones(num, bool),
        logp=logp,
        logp_old=logp,
        logp_sampler=logp,
        logp_ref=logp - np.float32(0.1),
        facts={**FACTS, "learner_version": step - 1},
    )


def healthy(folder):
    """Write a run of three steps with every file that a command reads."""
    folder.mkdir(parents=True)
    write_run_facts(folder, RUN)
    write_tokens(folder, {i: f"t{i} " for i in range(30)})
    for step in (1, 2, 3):
        write_record(folder, record(step))
        line = {"step": step, **METRICS, **TIMES, "rewards/legal/mean": 0.5}
        Journal(folder / "metrics.jsonl").append(line)
    Journal(folder / "events.jsonl").append(EVENT)
    Journal(folder / "probes.jsonl").append(PROBE)
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    (folder / "recovery.json").write_text(json.dumps(RECOVERY))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / ".lock").touch()
    return folder


def seal(run, *, rows=None, **changes):
    """Make the manifest of step 2 agree with what is there, but for the changes."""
    part = run / PART
    old = json.loads((run / MANIFEST).read_text())
    entry = {
        "file": part.name,
        "rows": old["parts"][0]["rows"] if rows is None else rows,
        "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
    }
    manifest = {"schema": 1, "step": 2, "parts": [entry], "facts": old["facts"], **changes}
    (run / MANIFEST).write_text(json.dumps(manifest))


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


# Parquet that is small on disk


def write_part(run, table, *, rows=None, **how):
    with (run / PART).open("wb") as file:  # Arrow takes no path that is not UTF-8
        pq.write_table(table, file, **{"compression": "zstd", **how})
    seal(run, rows=table.num_rows if rows is None else rows)


def zeros(values, num_rows=1, kind=np.int64):
    offsets = np.linspace(0, values, num_rows + 1).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(values, kind)))


def tokens(num, *, num_rows=1, **more):
    group = pa.array(np.arange(num_rows))
    mask = zeros(num, num_rows, np.bool_)
    return pa.table({"group": group, "token_ids": zeros(num, num_rows), "loss_mask": mask, **more})


def many_rows(run):
    write_part(run, tokens(0, num_rows=20_000_000))


def many_rows_within_the_limit(run):
    write_part(run, tokens(0, num_rows=131_072))


def many_groups_of_rows(run):
    write_part(run, tokens(20_000, num_rows=20_000), row_group_size=1)


def many_tokens(run):
    write_part(run, tokens(40_000_000), use_dictionary=False)


def tokens_within_the_limit(run):
    write_part(run, tokens(200_000, num_rows=100))


def many_steps_within_the_limit(run):
    """Repeat a step that decodes to as much as a small one may: a page shows 120 of them."""
    write_part(run, tokens(150_000, num_rows=10))
    for step in range(10, 70):
        folder = run / f"records/step={step:06d}"
        shutil.copytree(run / STEP, folder)
        manifest = json.loads((folder / "complete.json").read_text())
        (folder / "complete.json").write_text(json.dumps({**manifest, "step": step}))


def long_string(run):
    reason = pa.array(["A" * (1 << 30)])
    write_part(run, tokens(2, finish_reason=reason), use_dictionary=False)


def repeated_string(run):
    num = 20_000
    reason = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["A" * 1_000_000])
    write_part(run, tokens(num, num_rows=num, finish_reason=reason))


def long_string_of_no_meaning(run):
    write_part(run, tokens(2, notes=pa.array(["A" * (1 << 28)])), use_dictionary=False)


def many_columns(run):
    write_part(run, tokens(2, **{f"reward/{i}": pa.array([1.0]) for i in range(5000)}))


def lying_footer(run):
    """Let the footer claim a few values: Arrow believes the headers of the pages."""
    many_tokens(run)
    data = (run / PART).read_bytes()
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for place in (1, 2):
        column = group.column(place)
        for real in (column.total_uncompressed_size, column.num_values, group.total_byte_size):
            written = _varint(real)
            footer = footer.replace(written, _varint(1, len(written)))
    (run / PART).write_bytes(data[:start] + footer)
    seal(run, rows=1)


def _varint(value, length=0):
    value, written = value << 1, []
    while value >= 128 or len(written) + 1 < length:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def claimed_rows(run):
    seal(run, rows=10**9)


BOMBS = (
    *(many_rows, many_rows_within_the_limit, many_groups_of_rows, many_tokens),
    *(
        tokens_within_the_limit,
        many_steps_within_the_limit,
        long_string,
        repeated_string,
        long_string_of_no_meaning,
    ),
    *(many_columns, lying_footer, claimed_rows),
)

# Columns of the wrong kind


def columns(**changes):
    two = {
        "group": pa.array([0, 0]),
        "token_ids": pa.array([[1, 2], [3]]),
        "loss_mask": pa.array([[True, True], [True]]),
        "logp": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_old": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_sampler": pa.array([[-1.0, -2.0], [-0.5]]),
        "logp_ref": pa.array([[-1.0, -2.0], [-0.5]]),
        "reward": pa.array([1.0, 2.0]),
    }
    return pa.table({name: c for name, c in {**two, **changes}.items() if c is not None})


def floats(first, second, third):
    return pa.array([[first, second], [third]], pa.list_(pa.float64()))


INF, NAN = float("inf"), float("nan")
COLUMNS = {
    "log-probs of 1e308": {
        "logp_old": floats(1e308, -1e308, 1e300),
        "logp_ref": floats(-1e308, 1e308, -1e300),
        "logp_sampler": floats(-1e308, 1e308, 0.0),
        "logp": floats(-1e308, 1e308, 0.0),
    },
    "log-probs of infinity": {"logp_old": floats(INF, -INF, NAN), "logp_ref": floats(INF, 0, -INF)},
    "log-probs that are no numbers": {"logp_old": floats(NAN, NAN, NAN)},
    "positive log-probs": {"logp_old": floats(5.0, 1e9, 88.0)},
    "rewards of 1e308": {"reward": pa.array([1e308, -1e308]), "advantage": pa.array([INF, -INF])},
    "text for numbers": {"logp_old": pa.array([["x", "y"], ["z"]])},
    "lists of lists": {"logp_old": pa.array([[[1.0], [1.0]], [[1.0]]])},
    "negative ids": {"token_ids": pa.array([[-1, -(2**62)], [2**62]])},
    "huge groups": {"group": pa.array([2**63 - 1, -(2**63)])},
    "decimal groups": {"group": pa.array([1, 2]).cast(pa.decimal128(20, 0))},
    "times for groups": {"group": pa.array([1, 2]).cast(pa.timestamp("s"))},
    "no rows": {
        "group": pa.array([], pa.int64()),
        **{n: pa.array([], pa.list_(pa.int64())) for n in ("token_ids", "loss_mask")},
        **dict.fromkeys(("logp", "logp_old", "logp_sampler", "logp_ref", "reward")),
    },
    "empty lists": {
        "token_ids": pa.array([[], []], pa.list_(pa.int64())),
        "loss_mask": pa.array([[], []], pa.list_(pa.bool_())),
        **dict.fromkeys(("logp", "logp_old", "logp_sampler", "logp_ref")),
    },
    "nothing trained on": {"loss_mask": pa.array([[False, False], [False]])},
    "no mask": {"loss_mask": None},
    "no groups": {"group": None},
    "lists of another length": {"logp_ref": pa.array([[1.0], [1.0, 2.0]])},
    "no lists": {"token_ids": pa.array([1, 2])},
    "only nulls": {"reward": pa.nulls(2), "advantage": pa.array([None, None], pa.float64())},
    "a null list": {"token_ids": pa.array([[1, 2], None])},
    "versions": {
        "weight_version": pa.array([[2**62, -(2**62)], [0]]),
        "rank": pa.array([[-1, 2**62], [0]]),
        "emitted_by": pa.array([[100, -100], [5]]),
    },
    "overflow": {"emitted_by": pa.array([[1000, -1000], [5]])},
    "half floats": {"logp_old": pa.array([np.float16([-1, -2]), np.float16([-1])])},
    "names of rewards": {
        "reward/\x1b[2J\x07<script>alert(1)</script>": pa.array([1.0, 2.0]),
        "reward/": pa.array([1.0, 2.0]),
        "reward/a.b": pa.array([1.0, 2.0]),
    },
    "bytes for text": {
        "finish_reason": pa.array([b"\xff\xfe", b"\x80"]).view(pa.binary()),
    },
    "control characters": {"finish_reason": pa.array(["\x1b[2J", "\x00" * 2000])},
}


def spoil_columns(run, name):
    write_part(run, columns(**COLUMNS[name]))


def text_that_is_no_text(run):
    reason = pa.array([b"\xff\xfe\xfd", b"\x80"])
    text = pa.StringArray.from_buffers(2, reason.buffers()[1], reason.buffers()[2])
    write_part(run, columns(finish_reason=text))


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
