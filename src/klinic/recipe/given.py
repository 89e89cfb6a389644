"""Recipe sections as Python calls: `klinic.KL(...)` and `klinic.Recovery(...)`."""

from typing import Any, TypeVar

from pydantic import ValidationError

from klinic.errors import ConfigError
from klinic.recipe.kl import KLSection
from klinic.recipe.recovery import RecoverySection
from klinic.recipe.section import Section

AnySection = TypeVar("AnySection", bound=Section)


def KL(**settings: Any) -> KLSection:  # noqa: N802 - named like a class
    """Return a `kl` section; takes the keys of that section.

    >>> KL(coef=0.001).estimator
    'unbiased'
    """
    return _made(KLSection, "KL", settings)


def Recovery(**settings: Any) -> RecoverySection:  # noqa: N802
    """Return a `recovery` section; takes the keys of that section.

    >>> Recovery(kl_limit=0.5).lr_factor
    0.1
    """
    return _made(RecoverySection, "Recovery", settings)


def _made(kind: type[AnySection], name: str, settings: dict[str, Any]) -> AnySection:
    try:
        return kind(**settings)
    except ValidationError as error:
        said = [
            f"{name}({'.'.join(map(str, problem['loc']))}): "
            f"{problem['msg'].removeprefix('Value error, ')}."
            for problem in error.errors(include_url=False)
        ]
        known = ", ".join(kind.model_fields)
        raise ConfigError(f"{' '.join(said)} Available keys: {known}.") from None
