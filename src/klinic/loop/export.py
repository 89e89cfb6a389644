"""A trained model as a folder for other programs, held against the model that was trained."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from klinic.errors import ConfigError
from klinic.evidence.files import LARGEST, read_bytes
from klinic.evidence.writing import make_fresh_folder, remove_tree, write_durably
from klinic.learner.checkpoint import save_model
from klinic.loop.compare import Subject, find_subject
from klinic.model.adapter_files import base_of
from klinic.model.adapters import is_adapted, merge
from klinic.model.determinism import settle_kernels
from klinic.model.loading import Policy, load_policy
from klinic.model.probe import LIMIT, largest_difference, probe
from klinic.model.scorer import TokenScorer
from klinic.recipe.model import ModelSection
from klinic.report.model_card import CARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and how far it is from what was trained."""

    model: str
    to: str
    kind: str
    """`model`, `adapter`, or `merged` for a model that an adapter was merged into."""
    base: str | None
    """What an adapter is loaded on, or was merged into."""
    max_difference: float
    """Most that a log-prob differs from the trained model's, over all outcomes of the probe."""
    limit: float
    num_log_probs: int

    @property
    def ok(self) -> bool:
        """Whether it is the same model."""
        return self.max_difference <= self.limit


def export(path: str, *, to: str, merge_adapter: bool, run_code: bool = False) -> Exported:
    """Write a run's newest model, a checkpoint's or a folder's to a folder; keep it if it is right.

    The folder is loaded again from its files, and its log-probs are compared with the trained
    model's. Both in fp32: whatever a run computed in, its weights are fp32. Code that comes with
    the model runs only with `run_code`, and if the run's recipe says `trust_remote_code`.
    """
    return export_subject(find_subject(path, run_code=run_code), to=to, merge_adapter=merge_adapter)


def export_subject(subject: Subject, *, to: str, merge_adapter: bool) -> Exported:
    """Write a model that was found already."""
    settle_kernels()
    target = _free(to)
    trained = _load(subject.model, subject)
    adapter = is_adapted(trained.lm)
    expected = probe(trained.scorer)
    draft = target.with_name(f"{target.name}.unfinished")
    make_fresh_folder(draft)
    save_model(draft, _merged(trained) if adapter and merge_adapter else trained)
    card = Path(subject.model) / CARD
    if card.is_file() and not card.is_symlink():  # a link could lead to a file that is not a card
        write_durably(draft / CARD, read_bytes(card, largest=LARGEST))
    found = Exported(
        model=subject.model,
        to=str(target),
        kind=("merged" if merge_adapter else "adapter") if adapter else "model",
        base=base_of(Path(subject.model)) if adapter else None,
        max_difference=largest_difference(_read_back(draft, subject), expected),
        limit=LIMIT,
        num_log_probs=expected.numel(),
    )
    if found.ok:
        draft.rename(target)
    else:
        remove_tree(draft)
    return found


def _read_back(folder: Path, subject: Subject) -> Tensor:
    """Return the log-probs of what was written, as another program would load it."""
    return probe(_load(str(folder), subject).scorer)


def _load(name: str, subject: Subject) -> Policy:
    remote = subject.recipe is not None and subject.recipe.model.trust_remote_code
    section = ModelSection(name=name, trust_remote_code=remote)
    return load_policy(section, temperature=1.0, seed=0)


def _merged(policy: Policy) -> Policy:
    return replace(policy, scorer=TokenScorer(merge(policy.lm), temperature=1.0))


def _free(to: str) -> Path:
    """Return a folder that nothing would be lost in."""
    target = Path(to).expanduser()
    empty = target.is_dir() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not empty:
        raise ConfigError(f"--to is {to}, which is not an empty folder. Give a new one.")
    return target
