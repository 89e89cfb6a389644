"""Which tests can run here, and how the code blocks of README and docs are run."""

import atexit
import doctest
import gc
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent / "tests"))

import annotation_checks
from commands import klinic

annotation_checks.install()  # before the first import of klinic

HAS_TORCH = find_spec("torch") is not None
NEED_TORCH = (
    *("verify", "model", "integrations", "sampler", "learner", "training", "bench"),
    *("faults", "lab", "replay", "cluster", "capacity", "data", "trackers"),
)
WITHOUT_TORCH = ["write-evidence.md", "other-trainers.md"]  # pages that promise to need none
CACHE = pytest.StashKey[Path]()
AS_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# a shell in the background and nohup ignore these; tests send them to the commands that they start
SENT_BY_TESTS = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
for name, handler in SENT_BY_TESTS.items():
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# pytest-xdist uses the other cores; for commands that tests start as well
os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("trl") is not None:
    # or TRL would load vLLM, of which it supports other versions, with all its warnings
    import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False

# how long an example takes says nothing here: shapes are checked, cores are shared
# the same examples everywhere: a change that passes here passes where it is judged
hypothesis.settings.register_profile("klinic", deadline=None, derandomize=True)
hypothesis.settings.load_profile("klinic")

# for vLLM to import, in its own process
collect_ignore = ["src/klinic/sampler/vllm/weight_receiver.py"]
# programs of verl's own environment
collect_ignore += ["tests/integrations/verl_runs"]
if not HAS_TORCH:
    collect_ignore += [f"src/klinic/{part}" for part in NEED_TORCH]
    collect_ignore += [f"tests/{part}" for part in NEED_TORCH]
    collect_ignore += ["src/klinic/cli/verify_tables.py", "tests/tiny_policies.py"]
    collect_ignore += ["tests/allocated_memory.py"]
    collect_ignore += ["tests/accelerator"]
    collect_ignore += ["tests/doctor/test_live.py"]
elif find_spec("ray") is None:
    collect_ignore += ["src/klinic/cluster", "tests/cluster"]
if find_spec("matplotlib") is None:
    collect_ignore += ["src/klinic/report/page.py"]
    collect_ignore += ["src/klinic/report/serving.py"]
    collect_ignore += [f"tests/report/test_{name}.py" for name in ("page", "serving", "fuzz")]
if find_spec("chess") is None:
    collect_ignore += ["src/klinic/tasks/chess"]
    collect_ignore_glob = ["tests/tasks/test_chess_*.py"]


WHOLE = (
    *(".md", "test_proof.py", "test_resume.py", "test_poisoned_batch.py", "test_blow_ups.py"),
    *("test_export.py", "test_canaries.py", "hostile/test_links.py", "test_web.py"),
    *(
        "test_trial.py",
        "test_single_batch.py",
        "test_replayed_causes.py",
        "test_proofs_that_fail.py",
    ),
    *(
        "test_fsdp.py",
        "test_learner_processes.py",
        "test_trl_processes.py",
        "test_vllm.py",
        "test_ray_runs.py",
    ),
    *("test_standin.py", "test_fake_cuda.py", "test_notebook.py"),
)


OF_TRL = (
    *("tests/integrations/", "tests/bench/test_trl_comparison.py", "tests/bench/test_loss.py"),
    "docs/how-to/trl.md",
)


class PagesWhole(LoadScopeScheduling):
    """Give each test to any worker, but a page, or tests of one costly fixture, to one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith(OF_TRL):
            return "TRL"  # which takes seconds to import
        if path.startswith("tests/cluster/"):
            return "Ray"  # one cluster at a time
        return path if path.endswith(WHOLE) else nodeid


def pytest_configure(config: pytest.Config) -> None:
    """Give all workers, and what they start, one new cache: a warm start is made once."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="klinic-cache-")
        config.add_cleanup(folder.cleanup)
        os.environ["KLINIC_CACHE"] = folder.name
    config.stash[CACHE] = Path(os.environ["KLINIC_CACHE"])


@pytest.fixture(scope="session")
def warm_starts(pytestconfig: pytest.Config) -> Path:
    """The cache of warm starts that tests and pages share: a trial's takes longer than a trial."""
    return pytestconfig.stash[CACHE]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Take modules and collected tests out of every search for garbage: they all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report functions that are left over


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PagesWhole:
    return PagesWhole(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_TORCH:
        return
    config.hook.pytest_deselected(items=[item for item in items if "torch" in item.keywords])
    items[:] = [item for item in items if "torch" not in item.keywords]


def run_console(example: Example) -> str | None:
    """Run every `$` line of a console block and compare what it prints with what stands there."""
    folder = example.namespace["_page_folder"]
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", example.parsed, re.M):
        printed = run_command(command, Path(folder.name))
        if not doctest.OutputChecker().check_output(shown, printed, AS_SHOWN):
            return f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}"
    return None


def run_command(command: str, folder: Path) -> str:
    words = shlex.split(command, comments=True)
    if words[:2] == ["pip", "install"]:
        check_extras(words[2])
        return ""
    how: dict[str, Any] = {"cwd": folder, "timeout": 110}
    if words[0] == "klinic":
        result = klinic(*words[1:], **how)
    else:
        # beside this Python, so that the environment under test is the one that runs
        program = Path(sys.executable).with_name(words[0])
        result = subprocess.run(
            [program, *words[1:]], capture_output=True, text=True, check=False, **how
        )
    return result.stdout + result.stderr


def check_extras(requirement: str) -> None:
    """Fail where an install line names an extra that klinic does not have."""
    asked = re.findall(r"[\w-]+", requirement.partition("[")[2])
    known = metadata("klinic").get_all("Provides-Extra") or []
    assert set(asked) <= set(known), f"{requirement} asks for an extra that is not in {known}"


class SavedPython(PythonCodeBlockParser):
    """Python blocks; one that begins with `# name.py` is saved under that name as well."""

    def __call__(self, document: Document) -> Iterable[Region]:
        for region in super().__call__(document):
            name = re.match(r"# (\w+\.py)\n", str(region.parsed))
            if name:
                region.evaluator = saving(name[1], region.evaluator)
            yield region


def saving(name: str, evaluator: Any) -> Any:
    def evaluate(example: Example) -> Any:
        Path(example.namespace["_page_folder"].name, name).write_text(str(example.parsed))
        return evaluator(example)

    return evaluate


def open_page(namespace: dict[str, Any]) -> None:
    """Give a page a folder to work in, with recipes, and files of other trainers as `samples`."""
    folder = tempfile.TemporaryDirectory()
    root = Path(__file__).parent
    Path(folder.name, "recipes").symlink_to(root / "recipes")
    Path(folder.name, "samples").symlink_to(root / "tests/evidence/readers/own_writers")
    sys.path.insert(0, folder.name)  # what a page saves, it may import
    # names that no example uses
    namespace.update(_page_folder=folder, _path_before=sys.path[1:], _before=Path.cwd())
    os.chdir(folder.name)


def close_page(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_before"])
    sys.path[:] = namespace["_path_before"]
    namespace["_page_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        SavedPython(doctest_optionflags=AS_SHOWN),
        CodeBlockParser(language="console", evaluator=run_console),
    ],
    patterns=["*.md"] if HAS_TORCH else WITHOUT_TORCH,
    setup=open_page,
    teardown=close_page,
).pytest()
