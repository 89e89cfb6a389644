"""The result of a run: its folder, metrics and model."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.errors import MissingExtraError
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.learner.checkpoint import MODEL_DIR
from klinic.training import checkpoint

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = ("reward", "kl", "entropy", "completions/mean_length", "grad_norm")
"""Metrics of the summary, in this order."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    In a notebook it is shown as a table.
    """

    folder: Path
    """The run folder, for `klinic report`, `klinic diagnose` and `klinic eval`."""
    step: int
    """The last completed step."""
    before: dict[str, float]
    """Held-out metrics before the first step."""
    after: dict[str, float]
    """Held-out metrics at the end."""
    signal: int | None
    """The signal that stopped the run early, if any."""

    @property
    def model(self) -> Path:
        """Folder of the trained model, for `from_pretrained`."""
        return self.folder / checkpoint.FOLDER / checkpoint.folder_name(self.step) / MODEL_DIR

    @cached_property
    def history(self) -> list[dict[str, int | float]]:
        """One mapping per logged step: `step`, and the metrics of training or evaluation."""
        entries = Journal(self.folder.absolute() / METRICS).entries()
        # non-finite values are null in a journal
        return [
            {name: value for name, value in entry.items() if value is not None} for entry in entries
        ]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        entries = [(n, v) for entry in self.history for n, v in entry.items() if n != "step"]
        return {name: float(value) for name, value in entries}

    def to_pandas(self) -> "pd.DataFrame":
        """Return the metrics as a table: one row per step, one column per metric."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas needs pandas. Install it with: pip install pandas. result.history is "
                "the same as a list of mappings."
            ) from error
        frame = pd.DataFrame(self.history)
        return frame if frame.empty else frame.groupby("step").first()

    def load_model(self, **settings: Any) -> tuple[Any, Any]:
        """Return the trained model and its tokenizer.

        `settings` go to `from_pretrained`. An adapter is loaded on its base, as a PEFT model.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from klinic.model.adapter_files import is_adapter
        from klinic.model.loading import hide_progress_bars

        folder = str(self.model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with hide_progress_bars():
            if is_adapter(folder):
                from peft import PeftModel

                from klinic.model.adapter_files import base_model_name

                base = AutoModelForCausalLM.from_pretrained(base_model_name(self.model), **settings)
                return PeftModel.from_pretrained(base, folder), tokenizer
            return AutoModelForCausalLM.from_pretrained(folder, **settings), tokenizer

    def summary(self) -> dict[str, tuple[float, float]]:
        """Return the first and the last value of the most important metrics.

        Held-out metrics come first.
        """
        values = {name: (self.before[name], self.after.get(name)) for name in self.before}
        for name in SUMMARY:
            logged = [entry[name] for entry in self.history if name in entry]
            if logged:
                values[name] = (logged[0], logged[-1])
        return {name: (old, new) for name, (old, new) in values.items() if new is not None}

    def __repr__(self) -> str:
        changes = ", ".join(f"{n} {old:.4g} -> {new:.4g}" for n, (old, new) in self._shown())
        parts = [f"step={self.step}", f"folder={str(self.folder)!r}", changes]
        return f"Result({', '.join(part for part in parts if part)})"

    def _repr_html_(self) -> str:
        """Return the summary as HTML."""
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{old:.4g}</td><td>{new:.4g}</td></tr>"
            for name, (old, new) in self.summary().items()
        )
        folder = escape(str(self.folder))
        return (
            f"<p><b>klinic</b>: {self.step} steps in <code>{folder}</code></p>"
            f"<table><tr><th>metric</th><th>first</th><th>last</th></tr>{rows}</table>"
            "<p>Model: <code>result.load_model()</code>. Metrics: "
            "<code>result.to_pandas()</code>. "
            f"Report: <code>klinic report {folder}</code></p>"
        )

    def _shown(self) -> list[tuple[str, tuple[float, float]]]:
        return list(self.summary().items())[:3]
