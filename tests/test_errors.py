"""Every error survives the way from a worker to its driver."""

import inspect
import pickle

import pytest

from klinic import errors

ALL = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, errors.KlinicError) and error is not errors.KlinicError
]


@pytest.mark.parametrize("error", ALL)
def test_it_is_picklable_and_a_standard_exception(error):
    before = error("loop.group_size is 1: use 2 or more.")
    after = pickle.loads(pickle.dumps(before))  # noqa: S301 - our own bytes
    assert type(after) is error
    assert after.args == before.args
    standard = {ValueError, ImportError, TypeError, RuntimeError, OSError}
    assert any(issubclass(error, parent) for parent in standard)
