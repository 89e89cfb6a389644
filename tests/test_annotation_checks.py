"""While tests run, hints of functions and records are compared with what arrives."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError

from annotation_checks import check_annotations
from klinic.maths.kl_coef import KLCoefRule, KLCoefState, update

if TYPE_CHECKING:
    from decimal import Decimal

checks = check_annotations(typechecker=beartype)


@checks
def repeat(text: str, times: int = 1) -> list[str]:
    return [text] * times if text else [None]


@checks
def add(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    return a + b


@checks
def double(number: "int", unit: "Decimal | None" = None) -> "int":
    return 2 * number


@checks
@dataclass(frozen=True)
class Sides:
    kind: Literal["left", "right"]
    values: tuple[float, ...] = ()


@checks
@dataclass(frozen=True)
class Named(Sides):
    name: str | None = None


@checks
@dataclass(frozen=True)
class Rows:
    values: Float[np.ndarray, "rows 2"]


def test_what_fits_its_hints_goes_through():
    assert repeat("a", times=2) == ["a", "a"]
    assert add(np.ones(2), np.ones(2)).tolist() == [2, 2]
    assert double(2) == 4
    assert replace(Named("left", (0.5,), "b"), kind="right") == Named("right", (0.5,), "b")
    assert Rows(np.ones((3, 2))).values.sum() == 6


WRONG: list[Any] = [
    lambda: repeat(1),
    lambda: repeat("a", "b"),
    lambda: repeat(""),
    lambda: add(np.ones(2), np.ones(3)),
    lambda: add(np.ones(2), [1.0, 2.0]),
    lambda: add(np.ones((2, 1)), np.ones((2, 1))),
    lambda: double("a"),
    lambda: Sides("up"),
    lambda: Sides("left", ("a",)),
    lambda: Named("left", (), 1),
    lambda: Named("up"),
    lambda: Rows(np.ones((2, 3))),
]


@pytest.mark.parametrize("call", WRONG)
def test_what_does_not_fit_is_refused_at_every_call(call):
    for _ in range(2):
        with pytest.raises(TypeCheckError):
            call()


def test_checks_can_be_turned_off_and_on_again(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert repeat("") == [None]
    assert double("a") == "aa"
    assert add(np.ones(2), np.ones((2, 2))).shape == (2, 2)
    assert Sides("up").kind == "up"
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    for call in WRONG:
        with pytest.raises(TypeCheckError):
            call()


def test_methods_and_generators_are_checked():
    class Counter:
        @staticmethod
        @checks
        def one(number: int) -> int:
            return number

        @classmethod
        @checks
        def two(cls, number: int) -> str:
            return number

        @property
        @checks
        def three(self) -> int:
            return "three"

        @checks
        def four(self, last: int) -> Iterator[int]:
            yield from range(last)

    assert Counter.one(1) == 1
    assert list(Counter().four(2)) == [0, 1]
    for call in (lambda: Counter.one("a"), lambda: Counter.two(1)):
        with pytest.raises(TypeCheckError):
            call()
    with pytest.raises(TypeCheckError):
        Counter().three  # noqa: B018
    with pytest.raises(TypeCheckError):
        list(Counter().four("a"))


def test_functions_and_records_of_klinic_are_checked():
    state = KLCoefState(coef=0.01)
    with pytest.raises(TypeCheckError):
        update(KLCoefRule(), state, "0.1")
    with pytest.raises(TypeCheckError):
        replace(state, saturated="middle")
