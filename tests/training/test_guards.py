"""A real run tells its warning signs, once, and remembers across a stop that it did."""

import pytest

import klinic
from klinic.doctor import warning_signs
from klinic.doctor.warning_signs import DRIFT, KLLimits, WarningState
from klinic.evidence.files import Journal
from klinic.recipe.loading import load_recipe
from klinic.training import checkpoint, run

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("as_before")]
ROWS = [{"prompt": f"{n}+{m}="} for n in range(4) for m in range(4)]


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


@pytest.fixture
def impatient(monkeypatch):
    """Any KL is too far, at once, whatever the reward does."""
    monkeypatch.setattr(warning_signs, "WINDOW", 2)
    monkeypatch.setattr(warning_signs, "PATIENCE", 1)
    monkeypatch.setattr(warning_signs, "RISE", 1e12)
    monkeypatch.setattr(run, "kl_limits", lambda _kl: KLLimits(far=1e-9))


def train(folder, max_steps, **settings):
    klinic.train(
        model="tiny",
        reward_funcs=digits,
        train_dataset=ROWS,
        max_steps=max_steps,
        prompts_per_step=2,
        group_size=2,
        max_new_tokens=3,
        learning_rate=1e-2,
        threads=1,
        **{
            "output.trackers": [],
            "output.doctor": "none",
            "output.dir": str(folder),
            "loop.checkpoint_every": 2,
        },
        **settings,
    )


def told(folder):
    entries = Journal(folder / "events.jsonl").entries()
    return [entry for entry in entries if entry["event"] == DRIFT]


def test_a_sign_is_an_event_once_also_in_a_run_that_goes_on(tmp_path, impatient):
    folder = tmp_path / "run"
    train(folder, 4, kl_coef=0.01)
    (event,) = told(folder)
    assert event["unit"] == "nats per token"
    assert event["figure"] > event["limit"] == 1e-9
    assert event["says"].startswith("The KL is ")
    saved = checkpoint.newest_valid(folder).checkpoint
    assert DRIFT in WarningState.from_json(saved.state["signs"]).standing
    train(folder, 6, kl_coef=0.01, resume=True)
    assert told(folder) == [event]
    # by which it is known to end
    assert load_recipe(folder / "recipe.yaml").recipe.loop.max_steps == 6


def test_without_a_reference_there_is_no_kl_and_no_sign(tmp_path, impatient):
    folder = tmp_path / "run"
    train(folder, 4, kl_coef=0.0)
    assert told(folder) == []


def test_a_warm_up_of_the_reward_moves_nothing_in_its_first_step(tmp_path):
    folder = tmp_path / "run"
    train(folder, 3, kl_coef=0.1, **{"learner.reward_warmup_steps": 2})
    steps = list(Journal(folder / "metrics.jsonl").entries())
    steps = [entry for entry in steps if "reward_scale" in entry]
    assert [entry["reward_scale"] for entry in steps] == [0.0, 0.5, 1.0]
    assert [entry["grad_norm"] > 0 for entry in steps] == [False, True, True]
    assert [entry["kl"] > 0 for entry in steps] == [False, False, True]
