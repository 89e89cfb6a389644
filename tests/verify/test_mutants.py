"""Every mistake of `mutants.py`, made in a copy of klinic, is caught by whom it says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import klinic
from verify.mutants import MUTANTS

PACKAGE = Path(klinic.__file__).parent
ROOT = Path(__file__).parents[2]


def test_there_are_enough_and_no_two_are_the_same():
    assert len(MUTANTS) >= 15
    assert len({(m.file, m.wrong) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_edit_still_fits(mutant):
    assert (PACKAGE / "maths" / mutant.file).read_text().count(mutant.right) == 1


OFTEN = 8  # every so many are tried in each run of all tests; the others by hand (-m slow)


@pytest.mark.parametrize("mutant", MUTANTS[::OFTEN], ids=lambda mutant: mutant.name)
def test_it_is_caught(mutant, tmp_path):
    check_caught(mutant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [m for n, m in enumerate(MUTANTS) if n % OFTEN], ids=lambda mutant: mutant.name
)
def test_it_is_caught_too(mutant, tmp_path):
    check_caught(mutant, tmp_path)


def check_caught(mutant, tmp_path):
    result = catch(mutate(mutant, tmp_path), mutant.caught_by)
    assert "Traceback" not in result.stderr, "it did not run at all"
    assert result.returncode == 1, f"{mutant.name} survives {mutant.caught_by}\n{result.stdout}"


def test_without_a_mistake_nothing_is_caught():
    # the unit tests that catch the others pass without one in this very session
    assert catch(PACKAGE.parent, "verify").returncode == 0


def catch(source, catcher):
    if catcher == "verify":
        return run(source, "tests/verify/quick_proof.py")
    # without our options: shape checks and doctests are not what must catch it
    quietly = ("-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
    return run(source, "-m", "pytest", f"tests/maths/{catcher}", *quietly)


def mutate(mutant, folder):
    """Return a folder that holds klinic with one mistake in it."""
    shutil.copytree(PACKAGE, folder / "klinic", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "klinic" / "maths" / mutant.file
    text = path.read_text()
    assert text.count(mutant.right) == 1, "the edit must fit one place"
    path.write_text(text.replace(mutant.right, mutant.wrong))
    return folder


def run(source, *arguments):
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
