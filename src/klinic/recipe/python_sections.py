"""Recipe sections as Python calls: `klinic.KL(...)` and `klinic.Recovery(...)`."""

from typing import Any, TypeVar

from pydantic import ValidationError

from klinic.errors import ConfigError
from klinic.recipe.section import Section
from klinic.recipe.sections import KLSection, RecoverySection

AnySection = TypeVar("AnySection", bound=Section)


def KL(**settings: Any) -> KLSection:  # noqa: N802 - named like a class
    """Return a `kl` section; takes the keys of that section.

    >>> KL(coef=0.001).estimator
    'unbiased'
    """
    return _build_section(KLSection, "KL", settings)


def Recovery(**settings: Any) -> RecoverySection:  # noqa: N802
    """Return a `recovery` section; takes the keys of that section.

    >>> Recovery(kl_limit=0.5).lr_factor
    0.1
    """
    return _build_section(RecoverySection, "Recovery", settings)


def _build_section(kind: type[AnySection], name: str, settings: dict[str, Any]) -> AnySection:
    try:
        return kind(**settings)
    except ValidationError as error:
        messages = [
            f"{name}({'.'.join(map(str, problem['loc']))}): "
            f"{problem['msg'].removeprefix('Value error, ')}."
            for problem in error.errors(include_url=False)
        ]
        available = ", ".join(kind.model_fields)
        raise ConfigError(f"{' '.join(messages)} Available keys: {available}.") from None
