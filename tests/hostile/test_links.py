"""A run folder whose every file is a link to a file of the user: no command changes one."""

import hashlib
import shutil

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

# files and folders that some command writes, beside those that the finished run has
LATER = (
    *("report.html", "diagnosis.json", "recovery.json", "events.jsonl", "probes.jsonl"),
    *("wandb.json", "vllm.log", ".lock", "metrics.jsonl", "recipe.yaml", "run.json", "tokens.json"),
)
LATER_FOLDERS = (
    *("tensorboard", "wandb", "trackio", "start.unfinished", "records/step=000003"),
    *("checkpoints/step=000003", "checkpoints/step=000003.unfinished"),
)


class Linked:
    """A copy of a run, and the place outside where its links lead to."""

    def __init__(self, run, folder):
        self.run = shutil.copytree(run, folder / "run")
        self.outside = folder / "outside"
        self.outside.mkdir()

    def link(self, name):
        """Put a link in place of a file or folder of the run, which is kept outside."""
        place, kept = self.run / name, self.outside / name.replace("/", "|")
        if place.exists():
            shutil.move(place, kept)
        else:
            kept.write_text("mine")
        place.symlink_to(kept)

    def link_folder(self, name):
        """Put a link to a folder of the user's in place of a folder that is not there yet."""
        kept = self.outside / name.replace("/", "|")
        kept.mkdir(exist_ok=True)
        (kept / "mine").write_text("mine")
        (self.run / name).symlink_to(kept)

    def link_all(self):
        """Let every file be a link, and every folder that could come."""
        files = [path for path in self.run.rglob("*") if path.is_file()]
        for name in sorted({*(str(path.relative_to(self.run)) for path in files), *LATER}):
            self.link(name)
        for name in LATER_FOLDERS:
            self.link_folder(name)

    def digests(self):
        """Return every file outside with its digest."""
        return {
            str(path.relative_to(self.outside)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.outside.rglob("*"))
            if path.is_file()
        }


def words_of(name, run, tmp_path):
    """Return a command on a run folder, and the exit codes that it may end with."""
    recipe = tmp_path / "mine.yaml"
    resume = ["train", recipe, "--resume", f"output.dir={run}", "loop.max_steps=3"]
    return {
        "report": (["report", run], {0}),
        "terminal report": (["report", run, "--terminal"], {0}),
        "diagnose": (["diagnose", run], {0, 1}),
        "prove": (["diagnose", run, "--prove"], {0, 1, 2}),  # some of the links hold no JSON
        "watch": (["watch", run], {0}),
        "eval": (["eval", run, "--num", "1"], {0}),
        "export": (["export", run, "--to", tmp_path / "exported"], {0}),
        "resume": (resume, {2}),
        "resume with TensorBoard": ([*resume, "output.trackers=[tensorboard]"], {2}),
    }[name]


@pytest.fixture
def linked(trained, tmp_path):
    (tmp_path / "mine.yaml").write_text((trained / "recipe.yaml").read_text())
    return Linked(trained, tmp_path)


COMMANDS = (
    *("report", "diagnose", "prove", "watch", "eval", "export", "resume"),
    *("terminal report", "resume with TensorBoard"),
)
IN_CI = ("report", "prove", "export", "resume")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.slow]) for n in COMMANDS],
)
def test_no_command_changes_what_the_links_of_a_run_lead_to(name, linked, tmp_path, run_klinic):
    linked.link_all()
    (tmp_path / "exported.unfinished").symlink_to(linked.outside)
    before = linked.digests()
    words, codes = words_of(name, linked.run, tmp_path)
    done = run_klinic(*words)
    assert linked.digests() == before
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "place",
    [
        "metrics.jsonl",
        "checkpoints",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("records", "start", "events.jsonl", ".lock", "checkpoints/step=000002")
        ),
    ],
)
def test_a_run_with_one_link_out_of_it_is_not_resumed(place, linked, tmp_path, run_klinic):
    linked.link(place)
    before = linked.digests()
    done = run_klinic(*words_of("resume", linked.run, tmp_path)[0])
    assert linked.digests() == before
    assert done.returncode == 2
    assert f"{linked.run / place}: is a symbolic link to" in done.stderr
    assert "outside of the run folder" in done.stderr


def test_a_new_run_does_not_take_the_lock_of_a_link(linked, tmp_path, run_klinic):
    (tmp_path / "new").mkdir()
    kept = linked.outside / "lock"
    kept.write_text("mine")
    (tmp_path / "new" / ".lock").symlink_to(kept)
    done = run_klinic("train", tmp_path / "mine.yaml", f"output.dir={tmp_path / 'new'}")
    assert kept.read_text() == "mine"
    assert done.returncode == 2
    assert "is a symbolic link" in done.stderr


def test_a_model_card_that_is_a_link_is_not_exported(linked, tmp_path, run_klinic):
    for card in linked.run.rglob("README.md"):
        linked.link(str(card.relative_to(linked.run)))
    done = run_klinic("export", linked.run, "--to", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "exported" / "README.md").exists()


def test_a_report_quotes_no_recipe_that_is_a_link(linked, run_klinic):
    linked.link("recipe.yaml")
    (linked.outside / "recipe.yaml").write_text("machine example.org password not-a-secret\n")
    done = run_klinic("report", linked.run)
    assert done.returncode == 0, done.stderr
    page = (linked.run / "report.html").read_text()
    assert "recipe.yaml is a symbolic link" in page
    assert "not-a-secret" not in page


def test_a_run_without_a_link_is_resumed(linked, tmp_path, run_klinic):
    done = run_klinic(*words_of("resume", linked.run, tmp_path)[0])
    assert done.returncode == 0, done.stderr
    assert (linked.run / "checkpoints" / "step=000003").is_dir()
