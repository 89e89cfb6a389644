"""The run folder that is kept in tests/fixtures, and how it was made.

    python tests/fixture_run.py       from the root of the repository; needs torch

It is kept as the version of its day wrote it: later versions read, diagnose, report and resume it,
or refuse it without a change. A new schema gets a fixture of its own beside it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SCHEMA_1 = Path(__file__).parent / "fixtures" / "schema-1"
RECIPE = """
model: model
seed: 3
threads: 1
data: {task: arithmetic}
kl: {coef: 0.05}
rewards: [graduated]
recovery: {}
sampling: {max_new_tokens: 4}
loop: {max_steps: 4, prompts_per_step: 2, group_size: 2, checkpoint_every: 2, eval_every: 2,
       eval_prompts: 2}
learner: {learning_rate: 1e-3, micro_batch_size: 4}
output: {dir: run, trackers: []}
"""


def copy_fixture(folder: Path, fixture: Path = SCHEMA_1) -> Path:
    """Copy a fixture to a folder; return the run in it. The run's recipe is relative to it."""
    shutil.copytree(fixture, folder, dirs_exist_ok=True)
    return folder / "run"


def digest_of(folder: Path) -> str:
    """Return a digest over the names and bytes of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def make(folder: Path) -> None:
    """Train the run of a fixture, of a model with two thousand weights."""
    from klinic.model.tiny import tiny_tokenizer
    from tiny_policies import small_model

    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    small_model(n_embd=8, n_layer=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    klinic = Path(sys.executable).with_name("klinic")
    alone = {**os.environ, "KLINIC_SUPERVISED": "0"}
    subprocess.run([klinic, "train", "recipe.yaml"], cwd=folder, env=alone, check=True)
    (folder / "run" / ".lock").unlink()


if __name__ == "__main__":
    make(SCHEMA_1)
