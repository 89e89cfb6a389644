"""Write the unreleased part of CHANGELOG.md from the fragments, or check it with `--check`.

`towncrier build` later moves the fragments into the section of a version, below that part.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = re.compile(r"(<!-- unreleased -->\n).*?(<!-- end of unreleased -->)", re.DOTALL)


def unreleased() -> str:
    """Return the fragments as one section; nothing if there are none."""
    if not any((ROOT / "changes").glob("[0-9]*.md")):
        return ""
    draft = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    _, _, entries = draft.partition("\n\n")
    return f"## Unreleased\n\n{entries.strip()}\n"


def main() -> None:
    """Write the file; with `--check`, exit 1 if it is outdated."""
    text = CHANGELOG.read_text()
    section = unreleased()
    current = UNRELEASED.sub(lambda marks: marks[1] + section + marks[2], text)
    if "--check" not in sys.argv:
        CHANGELOG.write_text(current)
    elif current != text:
        sys.exit("CHANGELOG.md is outdated: run python .ci/changelog.py")


if __name__ == "__main__":
    main()
