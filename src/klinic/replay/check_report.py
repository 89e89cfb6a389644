"""The result of `klinic check`: one line per component, some completions, and the diagnosis."""

from dataclasses import dataclass, field

from klinic.doctor.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentResult:
    """The result of one component."""

    name: str
    ok: bool
    detail: str


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """Results of all components, some completions, and the diagnosis."""

    components: list[ComponentResult] = field(default_factory=list)
    samples: list[tuple[str, str, float]] = field(default_factory=list)
    """Prompt, completion and reward of some completions."""
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether every component works and no cause was found."""
        cause = None if self.diagnosis is None else self.diagnosis.cause
        return cause is None and all(part.ok for part in self.components)

    def add_component(self, name: str, detail: str, *, ok: bool = True) -> None:
        """Add the result of a component."""
        self.components.append(ComponentResult(name=name, ok=ok, detail=detail))
