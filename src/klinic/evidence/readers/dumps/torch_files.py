"""Finds dumps in torch's file format, which `klinic convert` reads where torch is installed.

    slime   DIR/rollout_data/N.pt and DIR/train_data/N.pt of --dump-details DIR
    miles   likewise, with train_data/N_RANK.pt
    SkyRL   dumped_data/global_step_N_training_input.pkl, a pickle: refused with a command that
            writes its tensors as .pt beside it

Nothing here opens a file or imports torch.
Source: slime 624b824a8, slime/utils/arguments.py:1890; miles 31f1ca961,
miles/utils/arguments.py:3185; SkyRL a9564572e, skyrl/train/trainer.py:1236.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.readers.trainer_state import list_folder

ROLLOUTS, TRAINED = "rollout_data", "train_data"
NUMBERED = re.compile(r"([0-9]{1,15})(?:_([0-9]{1,9}))?\.pt")
SKYRL = re.compile(r"global_step_([0-9]{1,15})_training_input\.(pkl|pt)")
SKYRL_FOLDER = "dumped_data"
MOST_ENTRIES = 100_000
MOST_FOLDERS = 20  # in that of a run, one of which may be that of --dump-details
SKYRL_COMMAND = (
    'python -c "import pathlib, pickle, torch; '
    "[torch.save({k: v for k, v in pickle.loads(p.read_bytes()).items() if torch.is_tensor(v)}, "
    "p.with_suffix('.pt')) for p in pathlib.Path('.').glob('*_training_input.pkl')]\""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep:
    """The files of one step."""

    step: int
    rollouts: Path | None = None
    """The samples, with groups and rewards."""
    trained: tuple[Path, ...] = ()
    """What was trained on, with log-probs and advantages: one file, or one per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDump:
    """A dump in torch's file format."""

    trainer: str
    """slime, miles or SkyRL."""
    folder: Path
    steps: tuple[TorchStep, ...]


def find_torch_dump(path: Path) -> TorchDump | None:
    """Return the dump at a path, or None; raise `EvidenceError` for one of pickles alone."""
    folder = path.parent if path.is_file() else path
    above = folder.parent if folder.name in (ROLLOUTS, TRAINED) else folder
    inside = [p for p in list_folder(folder)[:MOST_ENTRIES] if p.is_dir() and not p.is_symlink()]
    for root in (folder, above, *inside[:MOST_FOLDERS]):
        if steps := _slime_steps(root):
            is_miles = any("_" in file.stem for step in steps for file in step.trained)
            return TorchDump(trainer="miles" if is_miles else "slime", folder=root, steps=steps)
    for root in (folder, folder / SKYRL_FOLDER):
        matches = ((SKYRL.fullmatch(p.name), p) for p in list_folder(root)[:MOST_ENTRIES])
        files = [(int(m[1]), m[2], p) for m, p in matches if m]
        converted = sorted((step, file) for step, kind, file in files if kind == "pt")
        if converted:
            steps = tuple(TorchStep(step=step, trained=(file,)) for step, file in converted)
            return TorchDump(trainer="SkyRL", folder=root, steps=steps)
        if files:
            raise EvidenceError(_pickle_message(files[0][2]))
    return None


def advise_convert(path: Path) -> str:
    """Return what to do with a path that holds a dump of torch; "" if it holds none."""
    try:
        dump = find_torch_dump(path)
    except EvidenceError as error:
        return str(error)
    if dump is None:
        return ""
    return (
        f"{dump.folder}: is a dump of {dump.trainer} in torch's file format, which `klinic "
        f"diagnose` does not open. Where torch is installed, run: klinic convert {path} OUT, then: "
        "klinic diagnose OUT"
    )


def _slime_steps(root: Path) -> tuple[TorchStep, ...]:
    rollouts = {n: p for n, rank, p in _numbered_files(root / ROLLOUTS) if not rank}
    trained: dict[int, list[Path]] = {}
    for number, _, path in _numbered_files(root / TRAINED):
        trained.setdefault(number, []).append(path)
    return tuple(
        # rollouts are counted from 0
        TorchStep(step=n + 1, rollouts=rollouts.get(n), trained=tuple(trained.get(n, ())))
        for n in sorted(rollouts.keys() | trained.keys())
    )


def _numbered_files(folder: Path) -> list[tuple[int, str, Path]]:
    matches = ((NUMBERED.fullmatch(p.name), p) for p in list_folder(folder)[:MOST_ENTRIES])
    return [(int(m[1]), m[2] or "", p) for m, p in matches if m]


def _pickle_message(path: Path) -> str:
    return (
        f"{path}: is a pickle of SkyRL, and reading it would execute any code in it. Where SkyRL "
        f"is installed, write its tensors to files that klinic reads, in {path.parent}: "
        f"{SKYRL_COMMAND} - and then: klinic convert {path.parent} OUT"
    )
