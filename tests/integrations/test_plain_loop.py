"""The loop of `docs/how-to/plain-loop.md`: quiet as it stands, and its planted bugs are named."""

import re
from pathlib import Path

import pytest

from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "plain-loop.md"
LOOP = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
SCORED = "        logp, entropy = score("
BUGS = {
    "groups": (".repeat_interleave(GROUP, 0)\n", ".repeat(GROUP, 1)\n", "wrong-groups"),
    "sorted": (
        SCORED,
        "        order = mask.sum(1).argsort()\n"
        "        prompt, completion, mask = prompt[order], completion[order], mask[order]\n"
        + SCORED,
        "wrong-groups",
    ),
    "stale": ("sample(policy, prompt)", "sample(reference, prompt)", "stale-sampler"),
    "hot": (
        "model(ids)[:, -1].log_softmax",
        "(model(ids)[:, -1] / 0.6).log_softmax",
        "temperature-on-one-side",
    ),
    "ends": (
        "loss_mask = mask\n",
        "loss_mask = mask & (completion != EOS)\n",
        "stop-token-fault",
    ),
    "environment": (
        SCORED,
        "        completion[:, -2:], mask = 5, mask | (torch.arange(LENGTH) >= LENGTH - 2)\n"
        + SCORED,
        "wrong-loss-mask",
    ),
}
LOSS = "(0.01 * kl - ratio * "
WRONG_LOSSES = {
    "(-0.01 * kl - ratio * ": "kl-sign-flipped",
    "(-ratio * ": "kl-not-applied",
    "(0.01 * kl + ratio * ": "policy-gradient-wrong",
}


def cause_of(code, folder, steps=3):
    names = {}
    exec(compile(code, "loop.py", "exec"), names)  # noqa: S102 - the page's own code
    names["train"](folder, steps=steps)
    return diagnose(read_cases(folder), CHECKS).cause


def test_the_loop_is_quiet_as_it_stands(tmp_path):
    assert cause_of(LOOP, tmp_path / "run", steps=8) is None


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(tmp_path, name):
    right, wrong, cause = BUGS[name]
    assert LOOP.count(right) == 1
    assert cause_of(LOOP.replace(right, wrong), tmp_path / "run") == cause


@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_a_wrong_loss_is_named_from_its_value(tmp_path, wrong):
    assert LOOP.count(LOSS) == 1
    code = LOOP.replace(LOSS, wrong)
    assert cause_of(code, tmp_path / "run", steps=6) == WRONG_LOSSES[wrong]
