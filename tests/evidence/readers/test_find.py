"""What a path is, which of several logs is read, and what nobody should open."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_logs import FIXTURES, healthy, trl_entries, write_all, write_lines, write_trainer_state

from klinic.errors import EvidenceError
from klinic.evidence.readers.find import read_log


def test_every_format_is_known_by_its_path(tmp_path):
    paths = write_all(tmp_path)
    formats = {name: read_log(path).format for name, path in paths.items() if name != "tokens"}
    assert set(formats.values()) == {
        *("trainer_state.json", "JSON lines", "TensorBoard events", "W&B offline run", "Rollouts")
    }


def test_the_fixtures_are_read(tmp_path):
    for path in sorted(FIXTURES.iterdir()):
        if path.name not in ("README.md", "prime"):
            assert read_log(path).steps == (1, 2, 3, 4, 5, 6), path


def test_what_else_is_there_is_named(tmp_path):
    entries = trl_entries(healthy(5))
    write_trainer_state(tmp_path / "checkpoint-5" / "trainer_state.json", entries)
    write_lines(tmp_path / "metrics.jsonl", entries)
    log = read_log(tmp_path)
    assert log.format == "trainer_state.json"
    assert log.also == (str(tmp_path / "metrics.jsonl"),)


def test_a_log_without_a_known_ending_is_known_by_its_beginning(tmp_path):
    path = write_lines(tmp_path / "log.txt", trl_entries(healthy(3)))
    assert read_log(path).format == "JSON lines"


class Trap:
    """What runs where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (str(Path(os.environ["TRAP"]) / "sprung"),)


@pytest.mark.parametrize("name", ["rollout.pt", "training_args.bin", "log.jsonl", "log", "x.json"])
def test_a_pickle_is_refused_and_not_opened(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRAP", str(tmp_path))
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(EvidenceError, match=r"is a pickle.*Convert it where it was made"):
        read_log(path)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_of_pickles_says_so(tmp_path):
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04")
    with pytest.raises(EvidenceError, match=r"training_args\.bin, a pickle"):
        read_log(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="makes pipes and loops")
def test_pipes_loops_folders_and_holes_are_refused_at_once(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("hole.jsonl", "hole.json", "hole.wandb", "events.out.tfevents.1"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(EvidenceError):
            read_log(path)


def test_a_folder_that_contains_itself_is_no_hang(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path)
    (tmp_path / "wandb").symlink_to(tmp_path)
    with pytest.raises(EvidenceError, match="has no records"):
        read_log(tmp_path)


def test_scalars_need_neither_numpy_nor_torch(tmp_path):
    path = write_trainer_state(tmp_path / "trainer_state.json", trl_entries(healthy(30)))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from klinic.doctor.scalars.examine import examine_log\n"
        "from klinic.evidence.readers.find import read_log\n"
        f"assert not examine_log(read_log(Path({str(path)!r}))).sick\n"
        "heavy = {'numpy', 'pyarrow', 'pydantic', 'torch', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
