"""Files are replaced and logs grow without a link ever being followed."""

import os
import subprocess
import sys

import pytest

from klinic.errors import EvidenceError
from klinic.evidence.files import Journal
from klinic.evidence.writing import (
    make_fresh_folder,
    open_log,
    refuse_links_out,
    remove_tree,
    write_atomically,
    write_durably,
)


@pytest.fixture
def victim(tmp_path):
    """A file outside of the run."""
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("write", [write_atomically, write_durably])
def test_a_link_is_replaced_and_what_it_leads_to_stays(write, run, victim):
    (run / "report.html").symlink_to(victim)
    write(run / "report.html", b"page")
    assert victim.read_text() == "mine"
    assert not (run / "report.html").is_symlink()
    assert (run / "report.html").read_bytes() == b"page"
    assert [path.name for path in run.iterdir()] == ["report.html"]


@pytest.mark.parametrize("write", [write_atomically, write_durably])
def test_a_link_to_nothing_makes_nothing_elsewhere(write, run, tmp_path):
    (run / "report.html").symlink_to(tmp_path / "not there")
    write(run / "report.html", b"page")
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize("write", [write_atomically, write_durably])
def test_a_hard_link_is_cut(write, run, victim):
    (run / "run.json").hardlink_to(victim)
    write(run / "run.json", b"{}")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("write", [write_atomically, write_durably, lambda p, _: open_log(p)])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "linked folder", "linked pipe"])
def test_what_is_no_file_is_refused_at_once(write, kind, run, tmp_path):
    path = run / "out"
    place = tmp_path / "other" if "linked" in kind else path
    if "folder" in kind:
        place.mkdir()
    elif "pipe" in kind:
        os.mkfifo(place)
    if "linked" in kind:
        path.symlink_to(place)
    if kind == "device":
        path.symlink_to(os.devnull)  # a test must not risk the device itself
    with pytest.raises(EvidenceError, match=r"is a .*, and klinic writes only to regular files"):
        write(path, b"data")
    assert sorted(p.name for p in run.iterdir()) == ["out"]


def test_nothing_is_written_through_a_temporary_name_that_was_guessed(run, victim, monkeypatch):
    monkeypatch.setattr("klinic.evidence.writing.secrets.token_hex", lambda _: "guessed")
    (run / ".f.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(run / "f", b"data")
    assert victim.read_text() == "mine"


def test_a_long_name_can_be_written(run):
    write_atomically(run / ("a" * 255), b"data")
    assert [len(path.name) for path in run.iterdir()] == [255]


def test_a_log_grows_and_is_never_a_link(run, victim):
    for line in (b"one\n", b"two\n"):
        with open_log(run / "log") as file:
            file.write(line)
    assert (run / "log").read_bytes() == b"one\ntwo\n"
    (run / "link").symlink_to(victim)
    with pytest.raises(EvidenceError, match="is a symbolic link"):
        open_log(run / "link")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("content", ["", '{"step": 1}\n', '{"step": 1}\n{"st'])
def test_a_journal_that_is_a_link_is_refused(run, victim, content):
    victim.write_text(content)
    (run / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(EvidenceError, match=r"metrics\.jsonl: is a symbolic link"):
        Journal(run / "metrics.jsonl").append({"step": 2})
    assert victim.read_text() == content


def test_a_journal_with_another_name_elsewhere_grows_here_alone(run, victim):
    victim.write_text('{"step": 1}\n')
    (run / "metrics.jsonl").hardlink_to(victim)
    Journal(run / "metrics.jsonl").append({"step": 2})
    assert victim.read_text() == '{"step": 1}\n'
    assert [e["step"] for e in Journal(run / "metrics.jsonl").entries()] == [1, 2]


def test_a_folder_is_made_anew_and_of_a_link_only_the_link_goes(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    (run / "draft").symlink_to(tmp_path / "other")
    make_fresh_folder(run / "draft")
    assert not (run / "draft").is_symlink()
    assert list((run / "draft").iterdir()) == []
    (run / "draft" / "link").symlink_to(tmp_path / "other")
    remove_tree(run / "draft")
    remove_tree(run / "draft")  # nothing is there to remove
    assert (tmp_path / "other" / "mine").read_text() == "mine"


def test_a_run_with_a_link_out_of_it_is_refused_and_one_inside_is_not(run, tmp_path):
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "wandb" / "run-1" / "logs").mkdir()
    (run / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to(tmp_path / "of wandb")
    (run / "records" / "step=000001").mkdir(parents=True)
    refuse_links_out(run)
    through = tmp_path / "by another name"
    through.symlink_to(run)
    refuse_links_out(through)  # the user named it so
    for place in (
        "checkpoints",
        "records/step=000002",
        "wandb/run-2",
        "wandb/run-1/files",
        "report.html",
    ):
        (run / place).symlink_to(tmp_path / "outside")
        with pytest.raises(EvidenceError, match="outside of the run folder"):
            refuse_links_out(run)
        (run / place).unlink()


def test_a_pipe_as_out_is_refused_by_the_command_at_once(run):
    pytest.importorskip("matplotlib")
    os.mkfifo(run / "pipe")
    command = [sys.executable, "-P", "-m", "klinic.cli", "report", str(run), "--out"]
    done = subprocess.run(
        [*command, str(run / "pipe")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "is a folder, a pipe or a device" in done.stderr
