"""A finished run to make hostile copies of, and a way to run commands on them."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from commands import klinic as command

SMALL = {
    "max_steps": 2,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "threads": 1,
    "kl_coef": 0.1,
    "output.trackers": [],
    "output.doctor": "none",
    "loop.eval_prompts": 1,
}
LIMIT = 100  # seconds of a command on a busy machine


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run of a built-in task, whose metrics are wrong: there is a cause to prove."""
    import torch

    import klinic
    from klinic.evidence import store
    from klinic.evidence.files import Journal
    from klinic.evidence.run_facts import METRICS

    folder = tmp_path_factory.mktemp("trained") / "run"
    threads = torch.get_num_threads()
    klinic.train(model="tiny-gpt2", task="arithmetic", **SMALL, **{"output.dir": str(folder)})
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    journal = Journal(folder / METRICS)
    entries = [{**entry, "kl": 9.9} if "kl" in entry else entry for entry in journal.entries()]
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for step in store.complete_steps(folder):
        # a cause that is decided earlier, and of which there is no proof
        whole = replace(store.read_record(folder, step), finish_reason=None)
        shutil.rmtree(folder / "records" / f"step={step:06d}")
        store.write_record(folder, whole)
    return folder


@pytest.fixture
def run_klinic(tmp_path):
    """Return a function that runs a command where no file of the run is in reach by its name."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "KLINIC_CACHE": str(tmp_path / "cache")}

    def run(*words, **more):
        return command(*map(str, words), cwd=elsewhere, env={**env, **more}, timeout=LIMIT)

    return run
