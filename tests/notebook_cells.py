"""Runs the code cells of a notebook in one namespace; lines that begin with `!` go to the shell.

    python tests/notebook_cells.py NOTEBOOK           print the output of each cell as JSON
    python tests/notebook_cells.py NOTEBOOK --save    save it in the notebook as well

The working folder is that of the caller. What is displayed by IPython is not kept.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict) -> None:
    """Run a cell: shell lines one by one, the lines between them as Python."""
    lines: list[str] = []
    for line in source.splitlines():
        if line.startswith("!"):
            exec(compile("\n".join(lines), "cell", "exec"), namespace)  # noqa: S102 - a notebook of ours
            lines = []
            subprocess.run(line[1:], shell=True, check=False)  # noqa: S602
        else:
            lines.append(line)
    exec(compile("\n".join(lines), "cell", "exec"), namespace)  # noqa: S102


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Capture standard output of this process and its children."""
    printed: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            printed.append(file.read().decode())


def replace_display() -> None:
    """Stand in for IPython, which is not installed for tests."""
    display = types.ModuleType("IPython.display")
    display.HTML = str
    sys.modules.update({"IPython": types.ModuleType("IPython"), "IPython.display": display})


def run_notebook(notebook: dict) -> list[str]:
    """Run all code cells; return the standard output of each."""
    replace_display()
    sys.path.insert(0, str(Path.cwd()))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    namespace: dict = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        with captured() as printed:
            run_cell("".join(cell["source"]), namespace)
        outputs += printed
        cell["execution_count"] = number
        text = printed[0].splitlines(keepends=True)
        stream = {"output_type": "stream", "name": "stdout", "text": text}
        cell["outputs"] = [stream] if text else []
    return outputs


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text())
    outputs = run_notebook(notebook)
    if "--save" in sys.argv:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(json.dumps(outputs))
