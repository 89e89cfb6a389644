"""Merges the parts of a recorded step to a few files, so that ranks do not add files to a run.

The merged files get new names, then the manifest is replaced, then the old parts are removed: a
reader finds all old parts or all merged ones, also after a kill. Rows keep their order and values.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from klinic.errors import EvidenceError
from klinic.evidence.part_limits import MemoryBudget
from klinic.evidence.store import (
    PART_NAME,
    Part,
    complete_step,
    complete_steps,
    concat_parts,
    part_name,
    read_part,
    read_step_files,
    step_folder,
    write_part_table,
)
from klinic.evidence.writing import remove_tree

MAX_FILES = 4  # of a merged step
MERGED_BYTES = 64 << 20  # a step below this size is merged to one file
NUM_RESUMED = 16  # newest steps whose merge may have been interrupted


def merge_parts(run: Path, step: int) -> bool:
    """Merge the parts of a complete step to at most `MAX_FILES`; return whether it had more.

    A step with a part that cannot be read, or with columns of another writer, stays as it is.
    """
    files = read_step_files(run, step)
    folder = step_folder(run, step)
    if len(files.parts) <= MAX_FILES:
        _remove_unlisted(folder, files.parts)
        return False
    first = 1 + max(_part_number(part.file) for part in files.parts)
    budget = MemoryBudget(folder, [part.file for part in files.parts])
    groups = list(_split_by_size(folder, files.parts))
    merged = []
    for number, group in enumerate(groups, first):
        tables = [read_part(folder, part, budget, known_columns=False) for part in group]
        merged.append(write_part_table(folder / part_name(number), concat_parts(tables, folder)))
    complete_step(run, step, merged, files.facts)
    _remove_unlisted(folder, merged)
    return True


def finish_merges(run: Path, *, before: int) -> None:
    """Merge the newest steps before a step that a killed process left unmerged."""
    for step in [step for step in complete_steps(run) if step < before][-NUM_RESUMED:]:
        try_merge_parts(run, step)


def try_merge_parts(run: Path, step: int) -> None:
    """Merge the parts of a step; a step that cannot be merged stays readable as it is."""
    try:
        merge_parts(run, step)
    except (EvidenceError, OSError, pa.ArrowException):
        return  # the parts and their manifest are unchanged


def _split_by_size(folder: Path, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield consecutive parts for each merged file, of about equal size."""
    sizes = [(folder / part.file).stat().st_size for part in parts]
    total = sum(sizes)
    num_files = min(MAX_FILES, 1 + total // MERGED_BYTES)
    group: list[Part] = []
    written, number = 0, 0
    for part, size in zip(parts, sizes, strict=True):
        if group and written * num_files >= total * (number + 1):
            yield group
            group, number = [], number + 1
        group.append(part)
        written += size
    yield group


def _remove_unlisted(folder: Path, parts: Sequence[Part]) -> None:
    """Remove part files that the manifest does not name."""
    listed = {part.file for part in parts}
    for path in folder.iterdir():
        if PART_NAME.fullmatch(path.name) and path.name not in listed and not path.is_dir():
            remove_tree(path)


def _part_number(name: str) -> int:
    return int(name.removeprefix("part-").removesuffix(".parquet"))
