"""Both array libraries, as one fixture."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maths.examples import to_torch


@pytest.fixture(params=["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def array(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Turn a list or NumPy array into an array of the library under test."""
    return np.asarray if request.param == "numpy" else to_torch
