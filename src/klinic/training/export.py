"""Exports a trained model to a folder and verifies its log-probs against the original."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from klinic.errors import ConfigError
from klinic.evidence.files import LARGEST, read_bytes
from klinic.evidence.writing import make_fresh_folder, remove_tree, write_durably
from klinic.learner.checkpoint import save_model
from klinic.model.adapter_files import base_model_name
from klinic.model.adapters import has_adapter, merge_into_base
from klinic.model.determinism import initialize_vml_kernels
from klinic.model.equivalence import MAX_LOGP_DIFFERENCE, largest_difference, probe_logp
from klinic.model.loading import Policy, load_policy
from klinic.model.scorer import TokenScorer
from klinic.recipe.sections import ModelSection
from klinic.report.model_card import CARD_NAME
from klinic.training.compare import Subject, find_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The exported model and its log-prob difference from the trained one."""

    model: str
    to: str
    kind: str
    """`model`, `adapter`, or `merged` for a model that an adapter was merged into."""
    base: str | None
    """The base model of an adapter, merged or not."""
    max_difference: float
    """Largest log-prob difference from the trained model, over all outcomes of the probe."""
    limit: float
    num_log_probs: int

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit."""
        return self.max_difference <= self.limit


def export(path: str, *, to: str, merge_adapter: bool, run_code: bool = False) -> ExportResult:
    """Export the model of a run, a checkpoint or a folder; keep the export only if it verifies.

    The exported folder is loaded again and its log-probs are compared with the trained model's,
    both in fp32, the dtype of the stored weights. Code that comes with the model runs only with
    `run_code`, and if the run's recipe sets `trust_remote_code`.
    """
    return export_subject(find_subject(path, run_code=run_code), to=to, merge_adapter=merge_adapter)


def export_subject(subject: Subject, *, to: str, merge_adapter: bool) -> ExportResult:
    """Export a model that `find_subject` returned."""
    initialize_vml_kernels()
    target = _require_empty_folder(to)
    trained = _load_model(subject.model, subject)
    adapter = has_adapter(trained.lm)
    expected = probe_logp(trained.scorer)
    draft = target.with_name(f"{target.name}.unfinished")
    make_fresh_folder(draft)
    save_model(draft, _merge_adapter(trained) if adapter and merge_adapter else trained)
    card = Path(subject.model) / CARD_NAME
    if card.is_file() and not card.is_symlink():  # a link could point outside the run
        write_durably(draft / CARD_NAME, read_bytes(card, largest=LARGEST))
    result = ExportResult(
        model=subject.model,
        to=str(target),
        kind=("merged" if merge_adapter else "adapter") if adapter else "model",
        base=base_model_name(Path(subject.model)) if adapter else None,
        max_difference=largest_difference(_read_back_logp(draft, subject), expected),
        limit=MAX_LOGP_DIFFERENCE,
        num_log_probs=expected.numel(),
    )
    if result.ok:
        draft.rename(target)
    else:
        remove_tree(draft)
    return result


def _read_back_logp(folder: Path, subject: Subject) -> Tensor:
    """Return the log-probs of the exported model, loaded from its files."""
    return probe_logp(_load_model(str(folder), subject).scorer)


def _load_model(name: str, subject: Subject) -> Policy:
    remote = subject.recipe is not None and subject.recipe.model.trust_remote_code
    section = ModelSection(name=name, trust_remote_code=remote, device="cpu")
    return load_policy(section, temperature=1.0, seed=0)


def _merge_adapter(policy: Policy) -> Policy:
    return replace(policy, scorer=TokenScorer(merge_into_base(policy.lm), temperature=1.0))


def _require_empty_folder(to: str) -> Path:
    """Return the target folder; refuse one that is not empty."""
    target = Path(to).expanduser()
    empty = target.is_dir() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not empty:
        raise ConfigError(f"--to is {to}, which is not an empty folder. Give a new one.")
    return target
