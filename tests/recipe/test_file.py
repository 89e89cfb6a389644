"""A recipe file that cannot be read, and the one that was meant."""

import pytest

from klinic.errors import ConfigError
from klinic.recipe.file import MAX_FILE_BYTES, read_text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "arithmetic.yaml").write_text("model: tiny\n")
    return tmp_path


def refusal(path):
    with pytest.raises(ConfigError) as error:
        read_text(path)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", ["recipes/arithmetik.yaml", "arithmetic", "arithmetic.yml"])
def test_the_nearest_recipe_is_named(folder, name):
    message = refusal((folder / name).relative_to(folder))
    assert message == "there is no such file. Did you mean recipes/arithmetic.yaml?"


def test_recipes_nearby_are_listed(folder):
    assert refusal((folder / "zzz").relative_to(folder)).endswith(
        "Recipes nearby: recipes/arithmetic.yaml."
    )
    for index in range(7):
        (folder / f"{index}.yaml").write_text("")
    assert refusal((folder / "zzz").relative_to(folder)).endswith(" and 3 more.")


def test_where_there_is_none_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path / "none" / "zzz").endswith(f"Give its path relative to {tmp_path}.")


def test_a_folder_is_not_a_recipe(folder):
    assert refusal(folder / "recipes").startswith("this is a folder. Recipes nearby: ")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfmodel: tiny")
    assert read_text(tmp_path / "r.yaml") == "model: tiny"


def test_bytes_that_are_not_utf8_are_placed(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"model: \xff")
    assert refusal(tmp_path / "r.yaml").startswith("byte 7 is not UTF-8")


def test_a_dataset_is_not_a_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert len(read_text(path)) == MAX_FILE_BYTES
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert "1,000,001 bytes" in refusal(path)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    assert refusal(tmp_path / name)
