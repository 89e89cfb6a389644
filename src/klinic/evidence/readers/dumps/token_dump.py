"""TokenDump: the completions of a run as another trainer wrote them, as records."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klinic.evidence.record import StepRecord

CHARACTERS = "characters"  # of run.json's `token_ids`: a dump of texts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDump:
    """The steps of a dump, read one at a time."""

    format: str
    """For people, such as "training data of NeMo-RL"."""
    path: Path
    read_records: Callable[[], Iterator[StepRecord]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The run.json keys that hold for every such dump."""
    lacks: str = ""
    """What the format never has, for people."""
    num_files: int = 1
    """The files that are read, for progress."""

    @property
    def has_texts_only(self) -> bool:
        """Whether completions are texts, and tokens stand for their characters."""
        return self.facts.get("token_ids") == CHARACTERS
