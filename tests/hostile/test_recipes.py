"""A recipe is refused with a sentence, or loads and dumps back equal."""

import datetime
import time
from collections import Counter
from random import Random

import numpy as np
import pytest
from recipe_files import BOMBS, KEYS, VALUES, corpus, make_recipe

from klinic.errors import ConfigError
from klinic.recipe.loading import dump_recipe, flags_to_overrides, from_keywords, load_recipe

SAMPLE, WHOLE = 200, 2_500
FULL = pytest.param(WHOLE, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
LIMIT = 2.0  # seconds of CPU


def overrides(seed):
    """Return an override from a command line, for every third recipe."""
    rnd = Random(seed)  # noqa: S311 - a seed, not a secret
    if seed % 3:
        return []
    key, value = rnd.choice(KEYS), rnd.choice(VALUES).decode("utf8", "surrogateescape")
    flag = key.replace("_", "-").replace(".", "-")
    forms = [f"{key}={value}", f"--{key}={value}", f"--{flag}", key, f"={value}", f"--={value}"]
    return [rnd.choice(forms)]


def outcome(path, given):
    """Return `loads`, `refused`, or what is wrong."""
    try:
        loaded = load_recipe(path, flags_to_overrides(given))
    except ConfigError as error:
        return "refused" if str(error).strip() else "an empty message"
    path.write_bytes(dump_recipe(loaded.recipe).encode())
    again = load_recipe(path).recipe
    return "loads" if again == loaded.recipe else "dumps back unequal"


@pytest.mark.parametrize("num", [SAMPLE, FULL])
def test_every_recipe_is_refused_or_dumps_back_equal(num, tmp_path):
    shipped = corpus()
    outcomes, wrong, slowest = Counter(), [], 0.0
    for seed in range(num):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(make_recipe(seed, shipped))
        start = time.process_time()
        try:
            result = outcome(path, overrides(seed))
        except Exception as error:
            result = f"raised {type(error).__name__}: {error}"
        slowest = max(slowest, time.process_time() - start)
        outcomes[result] += 1
        if result not in {"loads", "refused"}:
            wrong.append(f"seed {seed}: {result[:300]}")
    assert not wrong, "\n".join(wrong[:20])
    assert slowest < LIMIT
    assert outcomes["loads"] > num * 0.05
    assert outcomes["refused"] > num * 0.5


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_a_bomb_is_refused_at_once(bomb, tmp_path):
    path = tmp_path / "recipe.yaml"
    for seed in range(6):
        path.write_bytes(bomb(Random(seed)))  # noqa: S311 - a seed, not a secret
        start = time.process_time()
        with pytest.raises(ConfigError, match=r"\S"):
            load_recipe(path)
        assert time.process_time() - start < LIMIT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: tiny\ntask: arithmetic\nseed: 1\nseed: 2\n", "line 4: .*'seed' is set twice"),
        ("model: tiny\nkl: {coef: 1, coef: 2}\n", "line 2: .*'coef' is set twice"),
        ("model: tiny\nmodel.name: other\ntask: arithmetic\n", "model"),
        ("model: !!python/object/apply:os.system [id]\n", r"tags \(!\) are not used"),
        ("model: &a [*a]\n", "anchors"),
        ("model: tiny\ntask: arithmetic\nseed: 2024-01-01\n", "seed"),
    ],
)
def test_a_refusal_says_what_is_wrong(text, says, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_recipe(path)


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


CYCLE: dict[str, object] = {}
CYCLE["a"] = CYCLE
OBJECTS = {
    "long": 10**5000,
    "bytes": b"x",
    "unshowable": Unshowable(),
    "cycle": CYCLE,
    "array": np.array([1, 2]),
    "scalar": np.float32(0.1),
    "integer": np.int64(3),
    "date": datetime.datetime(2024, 1, 1),
    "type": object,
    "pairs": {(1, 2): 3},
    "none": {None: 1},
    "surrogate": "\ud800",
    "set": {1},
    "complex": 1j,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_any_object_of_a_call_is_refused_or_dumps_back_equal(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    for key in [*KEYS, "model", "task", "kl", "data", "eval", "loop", "rewards", "zebra"]:
        given = {"model": "tiny", "task": "arithmetic", key: OBJECTS[name]}
        try:
            recipe = from_keywords(**given).recipe
        except ConfigError:
            continue
        path.write_bytes(dump_recipe(recipe).encode())
        assert load_recipe(path).recipe == recipe, key
