"""A run that was killed with SIGKILL and resumed leaves the evidence of one that was not."""

from contextlib import suppress

import pytest

from killed_commands import MissedError, finish, kill_once, kills, start
from run_differences import evidence_differences

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder, cache), folder, cache)
    return folder / "run"


@pytest.mark.parametrize("when", list(kills(12, seed=11)), ids=str)
def test_evidence_is_that_of_the_undisturbed_run(tmp_path, cache, whole, when):
    run = killed_run(tmp_path, cache, when)
    assert evidence_differences(whole, run) == []


def killed_run(tmp_path, cache, when, tries=5):
    """Return a run that was killed at a moment; one that missed it is not counted."""
    for number in range(tries):
        folder = tmp_path / str(number)
        with suppress(MissedError):
            print(kill_once(folder, cache, when))  # noqa: T201 - for the log
            return folder / "run"
    raise AssertionError(f"missed {tries} times: {when}")
