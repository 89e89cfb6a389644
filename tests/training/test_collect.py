"""A step samples on while groups have nothing to compare, and knows where the data stands."""

import numpy as np
import pytest

import klinic
from klinic.evidence.files import Journal
from klinic.evidence.rollout import Prompt, Rollout
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import DataSection, ModelSection
from klinic.rewards.scores import StepRewards
from klinic.sampler.protocol import LoadResult
from klinic.training import checkpoint
from klinic.training.collect import collect_rollouts
from klinic.training.state import PhaseTimer

pytestmark = pytest.mark.timeout(240)
NUM = 6  # prompts of the data
RECIPE = Recipe(model=ModelSection(name="tiny"), data=DataSection(task="arithmetic"))


class Pretend:
    """Two prompts a batch, two completions a prompt; even prompts have nothing to compare."""

    def __init__(self, extra_rounds, dull=lambda index: index % 2 == 0):
        self.sampler = self
        self.recipe = RECIPE.model_copy(
            update={"loop": RECIPE.loop.model_copy(update={"extra_rounds": extra_rounds})}
        )
        self._dull = dull

    def next_batch_index(self, batch_index):
        return batch_index + 1

    def prompt_batch(self, batch_index):
        places = ((batch_index - 1) * 2 % NUM, ((batch_index - 1) * 2 + 1) % NUM)
        return [
            Prompt(index=place, text="", token_ids=np.array([1]), columns={}) for place in places
        ]

    def load(self, weights):
        return LoadResult(fingerprint="")

    def close(self):
        raise NotImplementedError

    def sample(self, prompts, *, step):
        for prompt in reversed(prompts):
            yield [
                Rollout(prompt=prompt, sample=s, segments=(), finish_reason="stop", text="")
                for s in range(2)
            ]

    extend = greedy = sample

    def score_rollouts(self, rollouts):
        total = [0.0 if self._dull(r.prompt.index) else float(r.sample) for r in rollouts]
        parts = {"f": np.array([float(r.prompt.index) for r in rollouts])}
        return StepRewards(total=np.array(total), parts=parts, num_missing=0, num_nonfinite=1)


def gathered(extra_rounds, position=0, **how):
    pretend = Pretend(extra_rounds, **how)
    return collect_rollouts(
        pretend, step=1, batch_index=position, timer=PhaseTimer(), batch_indices=[]
    )


def trained_on(found):
    return [found.rollouts[row].prompt.index for row in found.chosen]


def test_without_further_rounds_a_step_is_one_batch():
    found = gathered(0)
    assert trained_on(found) == [0, 0, 1, 1]
    assert (found.batch_indices, found.num_dropped_groups) == ((1,), 0)


def test_groups_without_a_difference_are_replaced():
    found = gathered(5)
    assert trained_on(found) == [1, 1, 3, 3]
    assert (found.batch_indices, found.num_dropped_groups) == ((1, 2), 2)
    # what is reported is of all completions, in their order
    assert found.scores.parts["f"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.scores.num_nonfinite == 2


def test_when_no_round_is_left_the_batch_is_filled_up():
    found = gathered(1, dull=lambda index: index != 3)
    assert trained_on(found) == [0, 0, 3, 3]
    assert found.batch_indices == (1, 2)


def test_a_prompt_is_in_a_step_once_even_where_the_data_begins_again():
    found = gathered(9, dull=lambda index: True)
    assert sorted({r.prompt.index for r in found.rollouts}) == list(range(NUM))
    assert len(found.rollouts) == 2 * NUM
    assert found.batch_indices[-1] == 10


ROWS = [{"prompt": f"{n}="} for n in range(12)]


def hard(prompts, completions, **columns):
    """Have nothing to tell apart for prompts below 8."""
    digits = [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]
    return [d * (int(p[:-1]) >= 8) for d, p in zip(digits, prompts, strict=True)]


def train(folder, max_steps, **settings):
    return klinic.train(
        model="tiny",
        reward_funcs=hard,
        train_dataset=ROWS,
        output_dir=folder,
        max_steps=max_steps,
        prompts_per_step=2,
        group_size=2,
        max_new_tokens=3,
        learning_rate=1e-2,
        **{
            "loop.checkpoint_every": 1,
            "output.trackers": [],
            "output.doctor": "none",
            "threads": 1,
        },
        **settings,
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, as_before):
    monkeypatch.chdir(tmp_path)


def test_a_resumed_run_goes_on_where_its_data_stood(tmp_path):
    train("whole", 4, dynamic_sampling=True)
    train("parts", 2, dynamic_sampling=True)
    train("parts", 4, dynamic_sampling=True, resume=True)
    whole, parts = (entries(tmp_path / name) for name in ("whole", "parts"))
    assert whole == parts
    assert any(entry["sampling/rounds"] > 1 for entry in whole)
    saved = checkpoint.newest_valid(tmp_path / "whole").checkpoint
    assert saved.state["data"]["position"] == sum(entry["sampling/rounds"] for entry in whole)


def test_a_penalty_for_length_is_a_part_of_the_reward(tmp_path):
    train("long", 1, overlong_buffer_len=2)
    (entry,) = entries(tmp_path / "long")
    assert -1 <= entry["rewards/overlong/mean"] < 0
    total = entry["rewards/hard/mean"] + entry["rewards/overlong/mean"]
    assert entry["reward"] == pytest.approx(total)


def entries(folder):
    return [
        {name: value for name, value in entry.items() if not name.startswith("time/")}
        for entry in Journal(folder / "metrics.jsonl").entries()
    ]
