"""The lock files of CI and contributors: complete, hashed, and within the bounds of the package."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / ".ci" / "lock"
FILES = ("build", "sbom", "base", "test", "torch", "full", "source", "engine")
FULL = ("torch", "full", "source", "engine")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# vLLM's CPU build bears another name, and trackio is replaced by a stand-in in tests
NOT_INSTALLED = {"vllm", "trackio"}


def entries(name: str) -> list[str]:
    text = (LOCK / f"{name}.txt").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def versions(*names: str) -> dict[str, Version]:
    pins = [Requirement(entry.partition(" --hash")[0]) for name in names for entry in entries(name)]
    return {canonicalize_name(pin.name): Version(str(pin.specifier)[2:]) for pin in pins}


def needs(extra: str) -> list[Requirement]:
    """What an extra asks for, with the extras of klinic that it names."""
    asked = [Requirement(line) for line in EXTRAS[extra]]
    own = [name for need in asked if need.name == "klinic" for name in need.extras]
    more = [need for name in own for need in needs(name)]
    return [need for need in asked if need.name != "klinic"] + more


@pytest.mark.parametrize("name", FILES, ids="{}.txt".format)
def test_every_entry_is_one_version_with_hashes_and_nothing_else(name: str) -> None:
    pattern = r"[a-z0-9-]+==[\w.]+( ; [^#]*?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*"
    assert entries(name)
    assert [line for line in entries(name) if not re.fullmatch(pattern, line)] == []


def test_no_other_lock_file() -> None:
    assert sorted(LOCK.iterdir()) == sorted(LOCK / f"{name}.txt" for name in FILES)


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (PROJECT["build-system"]["requires"], ("build",)),
        (PROJECT["project"]["dependencies"], ("base",)),
        (PROJECT["project"]["dependencies"], FULL),
    ],
)
def test_the_lock_is_within_the_bounds(wanted: list[str], files: tuple[str, ...]) -> None:
    check_bounds([Requirement(line) for line in wanted], versions(*files))


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in NOT_INSTALLED])
def test_every_extra_is_locked_within_its_bounds(extra: str) -> None:
    check_bounds(needs(extra), versions(*FULL))


def test_the_test_extra_is_locked_beside_the_base() -> None:
    check_bounds(needs("test"), versions("base", "test"))


def check_bounds(wanted: list[Requirement], found: dict[str, Version]) -> None:
    missing = [need.name for need in wanted if canonicalize_name(need.name) not in found]
    assert missing == [], "not in the lock: run .ci/relock.py"
    outside = [
        f"{need}: {found[canonicalize_name(need.name)]}"
        for need in wanted
        if not need.specifier.contains(found[canonicalize_name(need.name)], prereleases=True)
    ]
    assert outside == [], "the lock is outside the bounds: run .ci/relock.py"


def test_both_environments_of_ci_have_the_same_versions_but_of_numpy() -> None:
    small, large = versions("build", "base", "test"), versions(*FULL)
    apart = [name for name in small.keys() & large.keys() if small[name] != large[name]]
    assert apart in ([], ["numpy"])  # numba, which vLLM needs, allows no newer one
