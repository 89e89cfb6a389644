"""Seeded dataset files: hostile text whose rows are known, damage of a kind, damage at random."""

import codecs
import csv
import datetime
import io
import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

SPLITTERS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"  # where str.splitlines splits and no format does
HOSTILE = [
    *SPLITTERS,
    *("\n", "\r", "\r\n", "\t", '"', '""', ",", ";", "'", "\\", "\\n", "\ufeff", "\u202e", "\x1b"),
    *(
        "\x7f",
        "\x01",
        "\xa0",
        "é",
        "e\u0301",
        "漢字",
        "🙂",
        "\U0010ffff",
        "\ufffe",
        "{",
        "}",
        "null",
    ),
    *("null", "=1+1", "#", "NaN", "-0", "1e999", " ", "  ", "\u200b", "{{x}}", "<script>", "%s"),
]
NAMES = ["answer", "a,b", 'c"d', "e f", "g\u2028h", "é", "\x0c", "n\nm", "", "prompt ", "漢"]
FORMATS = ("jsonl", "json", "csv", "parquet")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and what reading it must give."""

    suffix: str
    data: bytes
    rows: list[dict[str, Any]] | None = None
    """What must be read; None where the file must be refused."""
    says: tuple[str, ...] = ()
    """What a refusal must name."""
    known: bool = True
    """False where `oracle` must be used: the file was damaged at random."""


def make_case(seed: int) -> Case:
    """Return the case of a seed: half hostile and whole, a quarter each damaged in one way."""
    rnd = random.Random(seed)  # noqa: S311 - a seed, not a secret
    kind = seed % 4
    if kind == 2:
        return rnd.choice(DAMAGES)(rnd)
    case = whole(rnd, rnd.choice(FORMATS))
    return case if kind != 3 else mutated(rnd, case)


def text(rnd: random.Random, *, least: int = 0) -> str:
    """Return ordinary text with hostile pieces in it."""
    pieces = [
        rnd.choice(HOSTILE) if rnd.random() < 0.5 else rnd.choice(string.ascii_letters + " ")
        for _ in range(rnd.randint(least, 12))
    ]
    if rnd.random() < 0.02:
        pieces.append("x" * 140_000)  # beyond what the csv library takes by default
    return "".join(pieces)


def value(rnd: random.Random, depth: int = 0) -> Any:
    """Return a value that JSON and Parquet can hold."""
    kind = rnd.randrange(8 if depth < 3 else 6)
    if kind < 3:
        return text(rnd)
    if kind == 3:
        return rnd.choice([0, -1, 2**31, -(2**63), 2**63 - 1, rnd.randrange(10**6)])
    if kind == 4:
        return rnd.choice([0.5, -1e-300, 1e300, 0.1])
    if kind == 5:
        return rnd.choice([None, True, False])
    if kind == 6:
        return [value(rnd, depth + 1) for _ in range(rnd.randrange(3))]
    return {text(rnd, least=1): value(rnd, depth + 1) for _ in range(rnd.randrange(3))}


def make_rows(rnd: random.Random, make: Callable[[], Any]) -> list[dict[str, Any]]:
    names = rnd.sample(NAMES, rnd.randrange(4))
    return [
        {"prompt": text(rnd, least=1), **{name: make() for name in names}}
        for _ in range(rnd.randint(1, 6))
    ]


def whole(rnd: random.Random, suffix: str) -> Case:
    """Return a file that a trusted library wrote."""
    if suffix == "csv":
        return csv_case(rnd)
    if suffix == "parquet":
        rows = make_rows(rnd, lambda: rnd.choice([text(rnd), None]))
        for row in rows:
            row["nested"] = {"x": [text(rnd)], "n": rnd.randrange(9)}
        return Case(suffix=suffix, data=parquet_bytes(pa.Table.from_pylist(rows)), rows=rows)
    rows = make_rows(rnd, lambda: value(rnd))
    ascii_only = rnd.random() < 0.3
    if suffix == "json":
        indent = rnd.choice([None, 1])
        written = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    else:
        end = rnd.choice(["\n", "\n", "\r\n", "\r"])
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
        lines += [rnd.choice(["", "  ", "\t"])] * rnd.randrange(3)
        written = end.join(rnd.sample(lines[len(rows) :], len(lines) - len(rows)) + lines)
        written += rnd.choice(["", end])
    return Case(suffix=suffix, data=marked(rnd, written.encode()), rows=rows)


def csv_case(rnd: random.Random) -> Case:
    rows = make_rows(rnd, lambda: text(rnd))
    end = rnd.choice(["\n", "\r\n", "\r"])
    # with CR LF the library quotes every field that has one of the two
    quoting = csv.QUOTE_MINIMAL if end == "\r\n" and rnd.random() < 0.7 else csv.QUOTE_ALL
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end, quoting=quoting)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(row.values())
        out.write(end * rnd.choice([0, 0, 0, 1, 2]))
    written = out.getvalue()
    if rnd.random() < 0.3:
        written = written.removesuffix(end)
    return Case(suffix="csv", data=marked(rnd, written.encode()), rows=rows)


def marked(rnd: random.Random, data: bytes) -> bytes:
    return codecs.BOM_UTF8 + data if rnd.random() < 0.25 else data


def parquet_bytes(table: pa.Table) -> bytes:
    out = io.BytesIO()
    parquet.write_table(table, out)
    return out.getvalue()


def mutated(rnd: random.Random, case: Case) -> Case:
    """Return a file with some bytes replaced, inserted or gone."""
    data = bytearray(case.data)
    for _ in range(rnd.choice([1, 2, 8])):
        place = rnd.randrange(len(data) + 1)
        new = [b"\xe2\x80\xa8", b"\x0c", b'"', b"{", b"\\u", b"9" * 4400, b"\x00", b",", b"\n", b""]
        new.append(bytes([rnd.randrange(256)]))
        data[place : place + rnd.choice([0, 1, 1, 20])] = rnd.choice(new)
    if rnd.random() < 0.1:
        del data[rnd.randrange(len(data) + 1) :]
    return Case(suffix=case.suffix, data=bytes(data), known=False)


def oracle(suffix: str, data: bytes) -> list[Any] | None:
    """Return the rows of a file as a reader of whole strings sees them; None where it cannot."""
    limit = csv.field_size_limit()
    try:
        if suffix == "parquet":
            return list(parquet.read_table(io.BytesIO(data), use_threads=False).to_pylist())
        decoded = data.decode().removeprefix("\ufeff")
        if suffix == "json":
            return list(json.loads(decoded))
        if suffix == "jsonl":
            lines = re.split("\r\n|\r|\n", decoded)
            return [json.loads(line) for line in lines if line.strip()]
        csv.field_size_limit(1 << 26)
        return list(csv.DictReader(io.StringIO(decoded, newline=""), strict=True))
    except Exception:  # whatever it is, there is no truth to hold a reader to
        return None
    finally:
        csv.field_size_limit(limit)


def _long_number(rnd: random.Random) -> Case:
    digits = "9" * rnd.choice([4301, 5000, 20_000])
    good = rnd.randrange(4)
    lines = ['{"prompt": "a", "answer": 1}'] * good
    bad = rnd.choice(['{"prompt": "a", "answer": %s}', '{"prompt": "a", "answer": [{"x": -%s}]}'])
    lines.append(bad % digits)
    if rnd.random() < 0.5:
        data = f"[{','.join(lines)}]".encode()
        return Case(suffix="json", data=data, says=(f"row {good + 1}", "'answer'", "digits"))
    data = "\n".join(lines).encode()
    return Case(suffix="jsonl", data=data, says=(f"line {good + 1}", "'answer'", "digits"))


def _key_twice(rnd: random.Random) -> Case:
    good = rnd.randrange(4)
    lines = ['{"prompt": "a"}'] * good + ['{"prompt": "a", "answer": 1, "answer": 2}']
    if rnd.random() < 0.5:
        data = f"[{','.join(lines)}]".encode()
        return Case(suffix="json", data=data, says=(f"row {good + 1}", "'answer'", "twice"))
    data = "\n".join(lines).encode()
    return Case(suffix="jsonl", data=data, says=(f"line {good + 1}", "'answer'", "twice"))


def _column_twice(rnd: random.Random) -> Case:
    if rnd.random() < 0.5:
        return Case(suffix="csv", data=b"prompt,x,x\na,b,c\n", says=("'x'", "twice"))
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["prompt", "x", "x"])
    return Case(suffix="parquet", data=parquet_bytes(table), says=("'x'", "twice"))


def _ragged(rnd: random.Random) -> Case:
    good = rnd.randrange(4)
    row, name = rnd.choice([("a", "'x'"), ("a,b", "'y'"), ("a,b,c,d", "'y'")])
    data = "prompt,x,y\n" + "a,b,c\n" * good + row + "\n"
    return Case(suffix="csv", data=data.encode(), says=(f"row {good + 1}", name, "fields"))


def _bad_utf8(rnd: random.Random) -> Case:
    suffix = rnd.choice(["jsonl", "json", "csv"])
    line = {"csv": b"prompt\n", "json": b"[\n", "jsonl": b'{"prompt": "a"}\n'}[suffix]
    bad = rnd.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x80"])
    return Case(suffix=suffix, data=line + b'"' + bad + b'"', says=("line 2", "not UTF-8"))


def _other_encoding(rnd: random.Random) -> Case:
    encoding = rnd.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
    suffix = rnd.choice(["jsonl", "json", "csv"])
    data = {"csv": "prompt\na\n", "json": '[{"prompt": "a"}]', "jsonl": '{"prompt": "a"}\n'}
    return Case(suffix=suffix, data=data[suffix].encode(encoding), says=("UTF-16",))


def _zero_byte(rnd: random.Random) -> Case:
    data = b"prompt,answer\na,b\nc\x00,d\n"
    if rnd.random() < 0.5:
        return Case(suffix="csv", data=data, says=("line 3", "character 2", "zero byte"))
    return Case(suffix="jsonl", data=b'{"prompt": "a\x00"}', says=("line 1", "zero byte"))


def _open_quote(rnd: random.Random) -> Case:
    return Case(
        suffix="csv", data=b'prompt\na\n"b' + b"\n" * rnd.randrange(3), says=("not a CSV file",)
    )


def _no_rows(rnd: random.Random) -> Case:
    suffix, data = rnd.choice(
        [
            *(
                ("jsonl", b""),
                ("jsonl", b"\n\n"),
                ("csv", b""),
                ("csv", b"prompt\n"),
                ("json", b"[]"),
            ),
            *(("jsonl", codecs.BOM_UTF8), ("csv", codecs.BOM_UTF8), ("csv", b"\n\n")),
            ("parquet", parquet_bytes(pa.table({"prompt": pa.array([], pa.string())}))),
        ]
    )
    return Case(suffix=suffix, data=data, says=("no rows",))


def _beyond_python(rnd: random.Random) -> Case:
    """Return Parquet with a value that Python cannot hold, or text that is not UTF-8."""
    good = rnd.randrange(4)
    far = pa.array([0] * good + [2**62]).cast(pa.timestamp(rnd.choice(["ms", "us"])))
    near = pa.array([0] * good + [10**9 + 1]).cast(pa.timestamp("ns", tz="Not/AZone"))
    ends = b"".join(n.to_bytes(4, "little") for n in [*range(good + 1), good + 2])
    broken = pa.StringArray.from_buffers(
        good + 1, pa.py_buffer(ends), pa.py_buffer(b"a" * good + b"\xff\xfe")
    )
    array, bad_row = rnd.choice([(far, good + 1), (near, 1), (broken, good + 1)])
    table = pa.table({"prompt": ["a"] * (good + 1), "when": array})
    return Case(
        suffix="parquet", data=parquet_bytes(table), says=(f"row {bad_row}, column 'when'",)
    )


def _cut_parquet(rnd: random.Random) -> Case:
    data = parquet_bytes(pa.table({"prompt": ["a"], "day": [datetime.date(2020, 1, 1)]}))
    return Case(
        suffix="parquet", data=data[: rnd.randrange(len(data))], says=("not a readable Parquet",)
    )


DAMAGES = (
    *(_long_number, _key_twice, _column_twice, _ragged, _bad_utf8, _other_encoding, _zero_byte),
    *(_open_quote, _no_rows, _beyond_python, _cut_parquet),
)


def write(case: Case, folder: Path) -> Path:
    """Write the file of a case."""
    path = folder / f"rows.{case.suffix}"
    path.write_bytes(case.data)
    return path
