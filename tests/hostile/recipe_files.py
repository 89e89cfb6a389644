"""Seeded recipes: shipped ones with damaged lines, made-up ones with values of any kind, bombs."""

import random
from pathlib import Path

from klinic.recipe.keys import recipe_fields
from klinic.recipe.loading import dump_recipe, load_recipe

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
KEYS = sorted(recipe_fields())
PLAIN = """
0 -0 1e999 -1e999 .nan .inf null ~ [] {} "" '' true yes 0x10 0o7 1_000 1e-400 2024-01-01 1:30 = !x
*a "\\ud800" "\\u0000" "\\x1b" %TAG --- ... 1.5.5 +-1 1e e1 _1 1_ ._ -. .e1 0. inf nan NaN "1"
[1e-4] ../../etc/passwd ~/x /dev/zero http://u:p@h/x http://[::1 x.py: :x a:b:c @x `x` %x 1e18 0.1e1
18446744073709551616 -9223372036854775809 tiny arithmetic 0.01 5 bf16 k3 exact 'it''s' [1,[2,[3]]]
"""
VALUES = [
    *(word.encode() for word in PLAIN.split()),
    *(b"9" * 30, b"9" * 5000, b"x" * 100_000, b"!!python/object/apply:os.system [id]"),
    *(b"!!python/name:os.system", b"!!binary aGk=", b"!!set {a, b}", b"&a [1]", b"<<: {seed: 1}"),
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"|\n  x",
        b">-\n  y",
        b"? x",
        b"- 1",
        b"\t1",
        b"a #b",
    ),
    *(b"{a: {b: {c: 1}}}", b'"\x1b[2J"', "'\u202e'".encode(), "\u2028".encode(), "\x85".encode()),
    "é: 漢字".encode(),
]


def corpus() -> list[bytes]:
    """Return the shipped recipes, and one that names every key."""
    return [
        *(path.read_bytes() for path in SHIPPED),
        dump_recipe(load_recipe(SHIPPED[0]).recipe).encode(),
    ]


def make_recipe(seed: int, shipped: list[bytes]) -> bytes:
    """Return the recipe of a seed."""
    rnd = random.Random(seed)  # noqa: S311 - a seed, not a secret
    if seed % 5 == 0:
        return made_up(rnd)
    if seed % 50 == 1:
        return rnd.choice(BOMBS)(rnd)
    return damaged(rnd, rnd.choice(shipped))


def made_up(rnd: random.Random) -> bytes:
    """Return the least recipe and some keys of any value, a few of them twice."""
    lines = [b"model: tiny", b"task: arithmetic"]
    for key in rnd.choices(KEYS, k=rnd.randint(1, 4)):
        section, _, leaf = key.partition(".")
        if leaf and rnd.random() < 0.5:
            lines += [section.encode() + b":", b"  " + leaf.encode() + b": " + rnd.choice(VALUES)]
        else:
            lines.append(key.encode() + b": " + rnd.choice(VALUES))
    if rnd.random() < 0.2:
        lines.append(rnd.choice(lines))
    rnd.shuffle(lines)
    return b"\n".join(lines)


def damaged(rnd: random.Random, recipe: bytes) -> bytes:
    """Return a recipe with lines cut, repeated, dropped, moved or given other values."""
    lines = recipe.split(b"\n")
    for _ in range(rnd.choice([1, 1, 1, 2, 3, 6])):
        place = rnd.randrange(len(lines))
        line = lines[place]
        key = rnd.choice(KEYS)
        lines[place : place + 1] = rnd.choice(
            [
                [line[: rnd.randrange(len(line) + 1)]],
                [line, rnd.choice(lines)],
                [b""],
                [line.partition(b":")[0] + b": " + rnd.choice(VALUES)],
                [line.partition(b":")[0] + b": " + rnd.choice(VALUES)],
                [line.partition(b":")[0] + b": " + rnd.choice(VALUES)],
                [line[:3] + bytes([rnd.randrange(256)]) + line[4:]],
                [b" " * rnd.randrange(9) + line.lstrip()],
                [line, key.encode() + b": " + rnd.choice(VALUES)],
                [line.replace(b":", rnd.choice([b"::", b" :", b"=", b":\t", b""]))],
                [line, rnd.choice(VALUES)],
            ]
        )
    return b"\n".join(lines)


def _aliases(rnd: random.Random) -> bytes:
    """Return a few lines that stand for a billion values."""
    rows = [b"a: &a [x, x, x, x, x, x, x, x, x]"]
    rows += [b"%c: &%c [%s]" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefghij"]
    return b"\n".join(rows)


def _deep(rnd: random.Random) -> bytes:
    num = rnd.choice([21, 1000, 100_000])
    return b"model: " + rnd.choice([b"[", b"{a: ", b"- " if num < 100 else b"["]) * num


def _wide(rnd: random.Random) -> bytes:
    num = rnd.choice([2_000, 30_000])
    return b"".join(b"key%d: %d\n" % (n, n) for n in range(num))


def _long(rnd: random.Random) -> bytes:
    return b"model: tiny\ntask: " + b"x" * rnd.choice([10_000, 999_000, 2_000_000])


def _twice(rnd: random.Random) -> bytes:
    key = rnd.choice([b"seed: 1", b"kl:\n  coef: 0.1", b"model: tiny"])
    return b"model: tiny\ntask: arithmetic\n" + key + b"\n" + key


def _cycle(rnd: random.Random) -> bytes:
    return rnd.choice([b"model: &a [*a]", b"&a model: *a", b"model: &a {b: *a}"])


def _binary(rnd: random.Random) -> bytes:
    return rnd.randbytes(rnd.choice([1, 100, 5_000]))


BOMBS = (_aliases, _deep, _wide, _long, _twice, _cycle, _binary)
