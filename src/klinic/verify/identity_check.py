"""One identity that klinic's terms must satisfy, with its measured error."""

from dataclasses import dataclass

from klinic.verify.identify import TOLERANCE


@dataclass(frozen=True, kw_only=True)
class IdentityCheck:
    """One identity with its error and its tolerance."""

    name: str
    statement: str
    error: float
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; a NaN never is."""
        return self.error <= self.tolerance
