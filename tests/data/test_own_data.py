"""Texts, chats and tools train, from a recipe and from the command that people know."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import klinic
from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.evidence.record import EmittedBy
from klinic.learner.checkpoint import save_model
from klinic.model.loading import load_policy
from klinic.recipe.sections import ModelSection

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
SMALL = {
    "max_steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 40,
    "learning_rate": 1e-3,
    "threads": 1,
    "output.trackers": [],
    "output.doctor": "none",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, as_before):
    monkeypatch.chdir(tmp_path)


def chat(text):
    return [{"role": "user", "content": text}]


ROWS = {
    "text": [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)],
    "chat": [{"prompt": chat(f"{n}+1"), "answer": str(n + 1)} for n in range(4)],
}
REPLY = """
def reply(messages, answer):
    return f"it is {answer}" if len(messages) == 2 else None
"""


def lengths(prompts, completions, answer, **columns):
    """Prefer short ones; texts are given texts, chats are given messages."""
    said = [c if isinstance(c, str) else " ".join(m["content"] for m in c) for c in completions]
    kinds = {type(p) for p in prompts} | {type(c) for c in completions}
    assert kinds in ({str}, {list})
    return [-len(text) / 10 for text in said]


@pytest.mark.parametrize("kind", ROWS)
def test_texts_and_chats_train(kind):
    result = klinic.train(
        model="tiny", reward_funcs=lengths, train_dataset=ROWS[kind], kl_coef=0.01, **SMALL
    )
    record = store.read_record(result.folder, 1)
    assert record.loss_mask.all()
    assert np.abs(record.logp - record.logp_sampler).max() < 1e-4
    assert np.array_equal(record.logp, record.logp_ref)


def test_two_turns_with_a_tool_train_and_the_tool_is_not_trained_on():
    Path("tools.py").write_text(REPLY)
    result = klinic.train(
        model="tiny",
        reward_funcs=lengths,
        train_dataset=ROWS["chat"],
        kl_coef=0.01,
        **{"sampling.reply": "tools.py:reply", **SMALL, "max_new_tokens": 120},
    )
    record = store.read_record(result.folder, 1)
    tool = record.emitted_by == EmittedBy.TOOL
    assert tool.any()
    assert np.array_equal(record.loss_mask, ~tool)
    policy = record.loss_mask
    assert np.abs(record.logp - record.logp_sampler)[policy].max() < 1e-4
    assert np.array_equal(record.logp[policy], record.logp_ref[policy])


def test_a_model_whose_template_rewrites_history_does_not_train_with_tools(tmp_path):
    policy = load_policy(ModelSection(name="tiny"), temperature=1.0, seed=0)
    policy.tokenizer.chat_template = "{{ messages | length }}" + policy.tokenizer.chat_template
    save_model(tmp_path / "rewriting", policy)
    Path("tools.py").write_text(REPLY)
    with pytest.raises(ConfigError, match=r"chat template of .*rewriting rewrites history"):
        klinic.train(
            model=str(tmp_path / "rewriting"),
            reward_funcs=lengths,
            train_dataset=ROWS["chat"],
            **{"sampling.reply": "tools.py:reply", **SMALL},
        )


@pytest.mark.slow  # the flags are taken and echoed in test_train_command.py
def test_the_familiar_command_runs_on_a_local_folder(tmp_path):
    folder = tmp_path / "musique-mini" / "answerable"
    folder.mkdir(parents=True)
    paragraphs = [{"title": "lima", "paragraph_text": "lima is in peru."}]
    row = {
        "question": "where is lima?",
        "paragraphs": paragraphs,
        "answer": "peru",
        "answer_aliases": [],
        "answerable": True,
    }
    for split, num in (("train", 120), ("validation", 4)):
        (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * num)
    command = [
        Path(sys.executable).with_name("klinic"), "train", ROOT / "recipes" / "musique.yaml",
        "--datasets", f"{tmp_path / 'musique-mini'},answerable,train[:100]",
        "--kl-beta", "0.0", "--target-kl", "0.05", "kl.controller=dual_ascent",
        "--loss-type", "dr_grpo", "--batch-size", "8", "--num-generations", "8",
        "--max-steps", "1", "--learning-rate", "1e-5", "--output-dir", tmp_path / "run",
        "model.name=tiny", "model.dtype=fp32", "max_new_tokens=4",
        "data.map=klinic.tasks.multihop.musique:row",
        "reward_funcs=klinic.tasks.multihop.rewards:f1",
        f"eval={tmp_path / 'musique-mini'},answerable,validation",
        "eval.rewards=klinic.tasks.multihop.rewards:exact",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    for echo in (
        "kl_beta is written kl.coef here: 0.0",
        "target_kl is written kl.target here: 0.05",
        "loss_type is written learner.loss here: dr_grpo",
        "batch_size is written loop.prompts_per_step here: 8",
        "num_generations is written loop.group_size here: 8",
        "max_steps is written loop.max_steps here: 1",
        "8 prompts x 8 completions = 64 per step",
        "Step 1 | Loss: ",
        "Step 1 | Held out | reward: 0.000",
    ):
        assert echo in ran.stdout
