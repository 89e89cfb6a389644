"""Finds the batch dumps of other trainers at a path, by the names of files and their first line.

Nothing here imports NumPy: a reader is imported when its dump is opened.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klinic.evidence.readers import prime_rl_files, verl_rollouts
from klinic.evidence.readers.json_lines import first_entry
from klinic.evidence.readers.trainer_state import list_folder

if TYPE_CHECKING:
    from klinic.evidence.readers.dumps.token_dump import TokenDump

MOST_ENTRIES = 100_000
NEMO_RL = re.compile(r"train_data_step([0-9]{1,15})\.jsonl")
OPEN_INSTRUCT = re.compile(r"(.{1,200})_rollouts_([0-9]{6,15})\.jsonl")
TRL = re.compile(r"completions_([0-9]{1,15})\.parquet")
NEMO_RL_TOKENS = "token_ids"
MS_SWIFT = "completions.jsonl"
MS_SWIFT_LONGEST = 1 << 26  # bytes of a line, which has the texts of a whole step
MS_SWIFT_KEYS = {"step", "prompt", "completion", "advantages"}
AREAL_FOLDER = "rollout"
AREAL_KEYS = {"task_id", "head_version", "tail_version", "reward", "completion"}
TRACES = "traces.jsonl"
STEP_FOLDER = re.compile(r"step_([0-9]{1,15})")
VALIDATION = ("val", "eval", "test")
VERSION = re.compile(r"[0-9]{1,15}")
TOKEN_EXPORT, VERIFIERS_TRACES = "token export of prime-rl", "traces of verifiers"
SUBSETS = ("train/effective", "train/all")

Steps = list[tuple[int, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSource:
    """A dump that can be opened."""

    path: Path
    format: str
    open: "Callable[[], TokenDump]"


def find_dumps(path: Path) -> list[DumpSource]:
    """Return the dumps at a path, the most detailed first; a file belongs to its folder's dump."""
    sources = [source for finder in FINDERS for source in finder(path)]
    # a token export is joined with its traces
    is_joined = any(source.format == TOKEN_EXPORT for source in sources)
    return [s for s in sources if not (is_joined and s.format == VERIFIERS_TRACES)]


def is_dump_file(path: Path) -> bool:
    """Whether a file has the name of a dump, so that it is no log of metrics."""
    if path.name in (MS_SWIFT, TRACES):
        return True
    return any(name.fullmatch(path.name) for name in (NEMO_RL, OPEN_INSTRUCT, TRL))


def _prime_rl_tokens(path: Path) -> Iterator[DumpSource]:
    exports = prime_rl_files.find_exports(path)
    if exports is not None:
        roots = (path, exports.parent, exports.parent.parent)
        traces = next((dict(found) for root in roots if (found := _trace_files(root))), {})

        def open_dump() -> "TokenDump":
            from klinic.evidence.readers.dumps import prime_rl_tokens

            return prime_rl_tokens.open_dump(exports, traces)

        yield DumpSource(path=exports, format=TOKEN_EXPORT, open=open_dump)


def _nemo_rl(path: Path) -> Iterator[DumpSource]:
    for folder, files in _numbered_files(path, NEMO_RL, ("exp_*",)):
        first = first_entry(files[0][1])
        if first and NEMO_RL_TOKENS not in first:  # a distillation logs texts and lengths alone
            continue

        def open_dump(folder: Path = folder, files: Steps = files) -> "TokenDump":
            from klinic.evidence.readers.dumps import nemo_rl

            return nemo_rl.open_dump(folder, files)

        yield DumpSource(path=folder, format="training data of NeMo-RL", open=open_dump)


def _verifiers(path: Path) -> Iterator[DumpSource]:
    if path.name == TRACES and path.is_file():
        match = next((m for p in path.parents if (m := STEP_FOLDER.fullmatch(p.name))), None)
        files = [(int(match[1]) if match else 1, path)]
    else:
        files = _trace_files(path)
    if files and "traces" in first_entry(files[0][1]):

        def open_dump() -> "TokenDump":
            from klinic.evidence.readers.dumps import verifiers

            return verifiers.open_dump(path, files)

        yield DumpSource(path=path, format=VERIFIERS_TRACES, open=open_dump)


def _open_instruct(path: Path) -> Iterator[DumpSource]:
    runs: dict[str, list[Path]] = {}
    for file in [path] if path.is_file() else list_folder(path)[:MOST_ENTRIES]:
        if (match := OPEN_INSTRUCT.fullmatch(file.name)) and file.is_file():
            runs.setdefault(match[1], []).append(file)
    newest_first = sorted(runs.values(), key=lambda files: -files[-1].stat().st_mtime)
    for files in newest_first:

        def open_dump(files: list[Path] = files) -> "TokenDump":
            from klinic.evidence.readers.dumps import open_instruct

            return open_instruct.open_dump(files)

        yield DumpSource(path=files[0], format="traces of open-instruct", open=open_dump)


def _trl(path: Path) -> Iterator[DumpSource]:
    for folder, files in _numbered_files(path, TRL, ("completions",)):

        def open_dump(folder: Path = folder, files: Steps = files) -> "TokenDump":
            from klinic.evidence.readers.dumps import trl_completions

            return trl_completions.open_dump(folder, files)

        yield DumpSource(path=folder, format="completions of TRL", open=open_dump)


def _ms_swift(path: Path) -> Iterator[DumpSource]:
    file = path / MS_SWIFT if path.is_dir() else path
    if file.name != MS_SWIFT or not file.is_file():
        return
    if first_entry(file, longest=MS_SWIFT_LONGEST).keys() >= MS_SWIFT_KEYS:

        def open_dump() -> "TokenDump":
            from klinic.evidence.readers.dumps import ms_swift

            return ms_swift.open_dump(file)

        yield DumpSource(path=file, format="completions of ms-swift", open=open_dump)


def _areal(path: Path) -> Iterator[DumpSource]:
    for root in (path, path / AREAL_FOLDER):
        folders = [p for p in list_folder(root)[:MOST_ENTRIES] if VERSION.fullmatch(p.name)]
        versions = sorted((int(p.name), p) for p in folders if p.is_dir())
        inside = (p for _, f in versions[:1] for p in list_folder(f) if p.suffix == ".jsonl")
        first = next(inside, None)
        if first is not None and first_entry(first).keys() >= AREAL_KEYS:

            def open_dump(root: Path = root, versions: Steps = versions) -> "TokenDump":
                from klinic.evidence.readers.dumps import areal

                return areal.open_dump(root, versions)

            yield DumpSource(path=root, format="trajectories of AReaL", open=open_dump)


def _verl(path: Path) -> Iterator[DumpSource]:
    for folder in _verl_folders(path):
        yield from _verl_rollouts(folder)


def _verl_folders(path: Path) -> list[Path]:
    """Return the path, else its subfolders; those of a validation are not trained on."""
    if path.is_file() or verl_rollouts.find_rollouts(path):
        return [path]
    folders = [p for p in list_folder(path)[:MOST_ENTRIES] if p.is_dir() and not p.is_symlink()]
    return [p for p in folders if not p.name.lower().startswith(VALIDATION)]


def _verl_rollouts(path: Path) -> Iterator[DumpSource]:
    files = verl_rollouts.find_rollouts(path) if path.is_dir() else (path,)
    if files and verl_rollouts.is_rollouts(files[0]):
        numbers = ((m[1] if (m := verl_rollouts.FILE.fullmatch(p.name)) else "1", p) for p in files)
        steps = [(int(number), file) for number, file in numbers]

        def open_dump() -> "TokenDump":
            from klinic.evidence.readers.dumps import verl_texts

            return verl_texts.open_dump(path, steps)

        yield DumpSource(path=path, format="rollouts of verl", open=open_dump)


def _numbered_files(
    path: Path, name: re.Pattern[str], below: tuple[str, ...]
) -> Iterator[tuple[Path, Steps]]:
    """Yield the folders with files of that name: the path, or its subfolders of some names."""
    if path.is_file():
        match = name.fullmatch(path.name)
        if match:
            yield path, [(int(match[1]), path)]
        return
    folders = [path, *(folder for pattern in below for folder in sorted(path.glob(pattern)))]
    for folder in folders[:MOST_ENTRIES]:
        matches = ((name.fullmatch(p.name), p) for p in list_folder(folder)[:MOST_ENTRIES])
        files = sorted((int(m[1]), p) for m, p in matches if m and p.is_file())
        if files:
            yield folder, files


def _trace_files(root: Path) -> Steps:
    """Return the traces of each step: those that were trained on, if they were kept apart.

    An evaluation by verifiers writes one file, into the folder itself.
    """
    files = [(1, root / TRACES)] if (root / TRACES).is_file() else []
    for folder in list_folder(root / "rollouts")[:MOST_ENTRIES]:
        if match := STEP_FOLDER.fullmatch(folder.name):
            candidates = (folder / subset / TRACES for subset in SUBSETS)
            path = next((p for p in candidates if p.is_file()), None)
            if path is not None:
                files.append((int(match[1]), path))
    return sorted(files)


FINDERS: tuple[Callable[[Path], Iterator[DumpSource]], ...] = (
    *(_prime_rl_tokens, _nemo_rl, _verifiers, _open_instruct, _trl, _ms_swift, _areal, _verl),
)
"""The most detailed dump first: log-probs of two sides, of one, then texts."""
