"""A run that cannot be brought back to health ends with a sentence and exit code 1."""

import pytest

from commands import klinic

RECIPE = """
model: tiny
threads: 1
data: rows.jsonl
rewards: [rewards.py:huge]
sampling: {max_new_tokens: 4}
loop: {max_steps: 20, prompts_per_step: 1, group_size: 2, checkpoint_every: 4}
recovery: {grad_norm_limit: 2}
output: {dir: run, trackers: []}
"""
REWARDS = """
calls = 0

def huge(prompts, completions, **_):
    global calls
    calls += 1
    scale = 1e6 if calls > 12 else 1.0
    return [scale * n for n, _ in enumerate(completions)]
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_it_says_why_and_keeps_what_was_well(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "{n}+"}}' for n in range(30)))
    done = klinic("train", "recipe.yaml", cwd=tmp_path, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("RunStoppedError: run: gradient norm ")
    assert "failed batch 5 in a row without a step after step 13. Stopped and saved" in line
    assert "Traceback" not in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step=000012" / "model").is_dir()
