"""What holds for every formula: its documentation, both libraries, its edge, its shapes."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from klinic.errors import ShapeError
from maths.examples import EXAMPLES, FORMULAS, arguments, to_torch

ALL = pytest.mark.parametrize("name", sorted(FORMULAS))
HEADINGS = ("Formula:", "Symbols:", "Assumes:", "Source:", ">>>")


def plain(value: object) -> np.ndarray:
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


def test_every_formula_has_an_example_and_an_edge_case():
    assert sorted(EXAMPLES) == sorted(FORMULAS)


@ALL
def test_it_says_formula_symbols_assumption_source_and_shows_an_example(name):
    missing = [heading for heading in HEADINGS if heading not in (FORMULAS[name].__doc__ or "")]
    assert not missing, f"{name} lacks {missing}"


@pytest.mark.torch
@ALL
def test_numpy_equals_torch(name):
    args = EXAMPLES[name].args
    in_numpy = FORMULAS[name](**arguments(args, np.asarray))
    in_torch = FORMULAS[name](**arguments(args, to_torch))
    assert type(in_torch).__module__ == "torch"
    np.testing.assert_allclose(plain(in_torch), in_numpy, rtol=1e-13, atol=1e-15)
    assert plain(in_torch).dtype == np.asarray(in_numpy).dtype


@ALL
def test_the_edge_case_has_its_value(name, array):
    edge = FORMULAS[name](**arguments(EXAMPLES[name].edge, array))
    np.testing.assert_allclose(plain(edge), EXAMPLES[name].edge_value, atol=1e-12)


@ALL
def test_wrong_shapes_are_refused(name, array):
    """Drop the last entry of one array at a time, where there is another that must fit."""
    args = EXAMPLES[name].args
    refused = 0
    for changed in shortened(args):
        with pytest.raises((TypeCheckError, ShapeError)):
            FORMULAS[name](**arguments(changed, array))
        refused += 1
    assert refused or name in ALONE


# These take one array only, so that no shape can disagree; a scalar is refused below.
ALONE = {"entropy.entropy", "ratio.clip", "ratio.effective_sample_size", "masked.token_mean"}


@pytest.mark.parametrize("name", sorted(ALONE - {"ratio.clip"}))
def test_a_number_in_place_of_an_array_is_refused(name):
    args = dict(EXAMPLES[name].args)
    first = next(key for key, value in args.items() if isinstance(value, np.ndarray))
    with pytest.raises(TypeCheckError):
        FORMULAS[name](**(args | {first: 1.0}))


def shortened(args):
    """Yield the arguments with one array, or one array of a record, cut by its last entry."""
    for key, value in args.items():
        if isinstance(value, tuple):
            record, fields = value
            for cut in shortened(fields):
                yield args | {key: (record, cut)}
        elif isinstance(value, np.ndarray) and value.ndim and has_company(args, key):
            yield args | {key: value[:-1]}


def has_company(args, key):
    """Whether the same call has another array, which must then fit."""
    return any(k != key and isinstance(v, np.ndarray) for k, v in args.items())
