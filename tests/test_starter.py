"""examples/starter.py: as a process, and its functions one by one."""

import math
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

STARTER = Path(__file__).parents[1] / "examples" / "starter.py"
NUMBER = r"-?\d+\.\d{4}"
LINE = rf"Step (\d+) \| Loss: {NUMBER} \| Grad norm: {NUMBER} \| Reward: {NUMBER}"
WITHOUT_KL = rf"{LINE} \| KL penalty: 0\.0000"
WITH_KL = rf"{LINE} \| KL: {NUMBER} \| KL penalty: {NUMBER}"
MAX_LINES = 200


@pytest.fixture(scope="module")
def starter():
    spec = spec_from_file_location("starter", STARTER)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokens():
    """Two rows of three tokens, the last of them outside the mask."""
    import torch

    return {
        "log_probs": torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, -1.0]], requires_grad=True),
        "old_log_probs": torch.tensor([[-0.6, -1.0, -2.0], [-0.1, -2.9, -1.0]]),
        "advantages": torch.tensor([1.0, -0.5]),
        "mask": torch.tensor([[True, True, True], [True, True, False]]),
    }


@pytest.fixture
def reference():
    import torch

    return torch.tensor([[-0.7, -0.4, -2.0], [-0.3, -2.0, torch.nan]])


def run(*arguments):
    return subprocess.run(
        [sys.executable, STARTER, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def curves(folder):
    """Return every TensorBoard tag with its values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder)).Reload()
    return {tag: [point.value for point in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def gradient(starter, tokens, *reference_and_coef):
    import torch

    loss, _ = starter.compute_loss(*tokens.values(), *reference_and_coef)
    return torch.autograd.grad(loss, tokens["log_probs"])[0]


def step_gradient(starter, num_microbatches, *, kl_coef=0.3, reference_seed=2):
    """Return the gradient of all weights, and the numbers, for rows of unequal lengths."""
    import torch

    model, other = (starter.tiny_model(starter.TOKENIZER, seed) for seed in (1, reference_seed))
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (8, 9), generator=stream)
    mask = torch.arange(5) <= torch.tensor([0, 1, 4, 4, 4, 2, 0, 0])[:, None]
    old = starter.completion_log_probs(model, ids).detach()
    batch = starter.Batch(ids, old, torch.linspace(-1, 1, 8), mask)
    numbers = starter.grpo_microbatch_step(model, other, batch, kl_coef, num_microbatches)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), numbers


def test_the_file_can_be_read_in_ten_minutes():
    assert len(STARTER.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("options", "line", "kl_is_measured"),
    [
        pytest.param((), WITHOUT_KL, False, marks=pytest.mark.slow),
        (("--use-kl-penalty", "--kl-coef", "0.5"), WITH_KL, True),
    ],
)
def test_it_checks_itself_and_trains(options, line, kl_is_measured, tmp_path):
    result = run("--steps", 2, "--out", tmp_path, *options)
    assert result.returncode == 0, result.stderr
    first, *told = result.stdout.splitlines()
    end_of_tests = told.index("=== All Tests Passed! ===")
    assert first == "=== Running Quick Tests ==="
    assert end_of_tests == 7
    assert all(test.startswith("passed: ") for test in told[:end_of_tests])

    start, *steps, end = told[end_of_tests + 1 :]
    assert re.fullmatch(r"Reward at the start: 0\.\d{4}", start)
    assert re.fullmatch(r"Reward at the end: 0\.\d{4}", end)
    assert [re.fullmatch(line, step)[1] for step in steps] == ["1", "2"]

    found = curves(tmp_path)
    always = {"train/loss", "train/grad_norm", "train/reward", "train/kl_penalty"}
    assert set(found) == always | ({"train/kl"} if kl_is_measured else set())
    assert found["train/kl_penalty"][0] == 0  # the reference is the policy before its first update
    assert (found["train/kl_penalty"][1] > 0) == kl_is_measured
    if kl_is_measured:
        assert found["train/kl_penalty"][1] == pytest.approx(0.5 * found["train/kl"][1])


@pytest.mark.parametrize("coef", ["-0.1", "nan"])
def test_a_coefficient_that_is_no_penalty_is_refused(coef, starter, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["starter.py", f"--kl-coef={coef}"])
    with pytest.raises(SystemExit):
        starter.main()
    assert f"--kl-coef is {coef}" in capsys.readouterr().err


def test_kl_is_k3_per_token_and_is_never_differentiated(starter):
    import torch

    policy, ref = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.25, 0.2]]).log()
    found = starter.compute_kl_divergence(policy.requires_grad_(), ref)
    torch.testing.assert_close(found, torch.tensor([[math.log(2) - 0.5, 0.0]]))
    assert not found.requires_grad


def test_coefficient_zero_is_no_reference_to_the_bit(starter, tokens, reference):
    import torch

    without, meta = starter.compute_loss(*tokens.values())
    off, meta_off = starter.compute_loss(*tokens.values(), reference, 0.0)
    assert torch.equal(without, off)
    assert meta == meta_off == {"loss": without.item(), "kl_penalty_mean": 0.0}
    plain = gradient(starter, tokens)
    assert torch.equal(plain, gradient(starter, tokens, reference, 0.0))
    assert torch.equal(plain, gradient(starter, tokens, None, 0.5))


def test_the_penalty_is_the_coefficient_times_the_masked_mean(starter, tokens, reference):
    without, _ = starter.compute_loss(*tokens.values())
    loss, meta = starter.compute_loss(*tokens.values(), reference, 0.5)
    log_ratios = [-0.2, 0.6, 0.0, -0.2, 1.0]
    mean = sum(math.exp(d) - 1 - d for d in log_ratios) / 5
    assert meta["kl"] == pytest.approx(mean, rel=1e-5)
    assert meta["kl_penalty_mean"] == pytest.approx(0.5 * mean, rel=1e-5)
    assert loss.item() == pytest.approx(without.item() + 0.5 * mean, rel=1e-5)
    assert meta["loss"] == loss.item()


def test_the_penalty_pulls_each_token_by_its_ratio_times_k1(starter, tokens, reference):
    pull = gradient(starter, tokens, reference, 0.5) - gradient(starter, tokens)
    ratio_and_k1 = [(0.1, 0.2), (0.0, -0.6), (0.0, 0.0), (0.0, 0.2), (-0.1, -1.0)]
    right = [0.5 * math.exp(log_ratio) * k1 / 5 for log_ratio, k1 in ratio_and_k1]
    assert pull.flatten().tolist() == pytest.approx([*right, 0.0], abs=1e-7)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_micro_batches_change_nothing(num, starter):
    import torch

    whole, numbers = step_gradient(starter, 1)
    parts, numbers_of_parts = step_gradient(starter, num)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert numbers_of_parts == pytest.approx(numbers, abs=1e-6)
    assert numbers["kl_penalty_mean"] > 0


def test_a_reference_is_asked_only_where_it_counts(starter, monkeypatch):
    import torch

    asked, score = [], starter.completion_log_probs
    monkeypatch.setattr(
        starter,
        "completion_log_probs",
        lambda model, ids: asked.append(torch.is_grad_enabled()) or score(model, ids),
    )
    step_gradient(starter, 1, kl_coef=0.0)
    assert asked == [True, True]  # the old log-probs of the test itself, then the policy
    asked.clear()
    step_gradient(starter, 1, kl_coef=0.3)
    assert asked == [True, False, True]


def test_what_follows_the_end_is_neither_trained_on_nor_read(starter):
    import torch

    row = {"prompt": "copy 12=", "answer": "12"}
    script = starter.TOKENIZER.encode("12<|eos|>99")

    class Scripted:
        """Say the same five tokens after every prompt, whatever was said before."""

        def __call__(self, ids):
            logits = torch.full((*ids.shape, len(starter.TOKENIZER)), -1e4)
            for place in range(ids.shape[1]):
                logits[:, place, script[max(0, place - 7) % 5]] = 0.0
            return type("Output", (), {"logits": logits})

    batch, reward = starter.sample(Scripted(), [row], 2)
    assert batch.ids[:, -5:].tolist() == [script] * 2
    assert batch.mask.tolist() == [[True, True, True, False, False]] * 2
    assert reward == 1.0
    assert batch.advantages.tolist() == [0.0, 0.0]
