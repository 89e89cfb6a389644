"""Thousands of recipes that cannot work: each is refused in words that help; nothing escapes."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.recipe import from_keywords, load_recipe
from klinic.recipe.aliases import ALIASES
from klinic.recipe.keys import edit_distance, recipe_fields, recipe_sections
from recipe.malformed import KINDS, malformed, of_kind

NUM = 5_000
LONGEST_LINE = 400


@pytest.mark.parametrize("kind", KINDS)
def test_is_refused_by_name(kind, tmp_path):
    path = tmp_path / "r.yaml"
    for case in of_kind(kind, NUM // len(KINDS) + 1, seed=20):
        path.write_bytes(case.content)
        with pytest.raises(ConfigError) as refusal:
            load_recipe(path)
        message = str(refusal.value)
        assert message.startswith(str(path)), case
        assert case.key is None or case.key in message, (case, message)
        assert case.nearest is None or meant(case, message), (case, message)
        assert all(len(line) - len(str(path)) < LONGEST_LINE for line in message.splitlines())


def meant(case, message):
    """Tell whether the message names the right key, or one that is no farther."""
    return case.nearest in message or nearer(case.key, case.nearest, message)


def nearer(wrong, right, message):
    leaf = wrong.rpartition(".")[2]
    distance = {key: edit_distance(wrong, key) for key in (*recipe_fields(), *recipe_sections())}
    distance |= {key: edit_distance(leaf, key) + (leaf != wrong) for key in ALIASES}
    rivals = [key for key, d in distance.items() if key != right and d <= distance[right]]
    said = [target if isinstance(target := ALIASES.get(key, key), str) else key for key in rivals]
    return any(key in message.partition("Did you mean")[2] for key in said)


def test_the_generator_makes_the_same_recipes_again():
    assert list(malformed(100, seed=3)) == list(malformed(100, seed=3))
    assert len(list(malformed(100, seed=3))) == 100
    assert list(malformed(100, seed=3)) != list(malformed(100, seed=4))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
names = st.sampled_from([*recipe_fields(), *recipe_sections(), *ALIASES]) | st.text(max_size=12)


@given(st.dictionaries(names, plain, max_size=6))
def test_from_any_keywords_only_a_config_error_comes(values):
    with suppress(ConfigError):
        from_keywords(**values)


@given(st.binary(max_size=200))
def test_from_any_bytes_only_a_config_error_comes(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            load_recipe(path)
