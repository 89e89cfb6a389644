"""Defaults, bounds with their reasons, and settings that do not go together."""

from typing import get_args

import pytest
from pydantic import ValidationError

from klinic.errors import ConfigError
from klinic.maths.advantage import ADVANTAGES
from klinic.maths.importance import Mode
from klinic.maths.kl_coef import RULES
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.surrogate import SURROGATES
from klinic.recipe import Recipe, check_complete, from_keywords
from klinic.recipe.keys import recipe_fields
from klinic.recipe.sections import (
    AdvantageName,
    EstimatorName,
    ImportanceSamplingName,
    LossName,
)

TASK = {"model": "tiny", "task": "arithmetic"}
FILE = {"model": "tiny", "data": {"path": "mine.jsonl"}}


def recipe(**values):
    return from_keywords(**(TASK | values)).recipe


def refusal(**values):
    with pytest.raises(ConfigError) as error:
        from_keywords(**({} if "data" in values else TASK) | {"model": "tiny"} | values)
    return str(error.value)


def test_names_are_those_of_the_registries():
    assert get_args(EstimatorName) == tuple(ESTIMATORS)
    assert get_args(LossName) == tuple(SURROGATES)
    assert get_args(AdvantageName) == tuple(ADVANTAGES)
    assert get_args(ImportanceSamplingName) == ("auto", "none", *get_args(Mode))
    assert get_args(recipe_fields()["kl.controller"].annotation) == tuple(RULES)


def test_without_a_kl_section_there_is_no_kl():
    assert recipe().kl is None
    assert recipe().warm_start is None


def test_defaults_of_a_kl_section():
    kl = recipe(kl={}).kl
    assert (kl.coef, kl.estimator, kl.controller, kl.target) == (0.01, "unbiased", "fixed", 0.05)


def test_importance_weights_are_on_where_sampling_may_run_ahead():
    assert recipe().importance_sampling is None
    assert recipe(cluster={"max_staleness": 1}).importance_sampling == "token_truncate"
    stale = {"cluster": {"max_staleness": 1}, "learner": {"importance_sampling": "none"}}
    assert recipe(**stale).importance_sampling is None
    masked = recipe(learner={"importance_sampling": "token_mask"})
    assert masked.importance_sampling == "token_mask"
    assert "the largest weight" in refusal(learner={"importance_sampling_cap": 0})


def test_a_recipe_is_frozen_all_the_way_down():
    frozen = recipe(kl=0.02, rewards=["binary"])
    for section, name in ((frozen, "seed"), (frozen.kl, "coef"), (frozen.rewards[0], "weight")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 1)
    assert isinstance(frozen.rewards, tuple)


BOUNDS = {
    "seed": (0, -1),
    "threads": (1, 0),
    "model.lora_rank": (1, 0),
    "kl.coef": (0.0, -1e-9),
    "kl.warmup_steps": (0, -1),
    "kl.monitor_every": (0, -1),
    "sampling.temperature": (1e-3, 0.0),
    "sampling.top_p": (1.0, 1.001),
    "sampling.top_k": (0, -1),
    "sampling.min_p": (0.0, 1.0),
    "sampling.max_new_tokens": (1, 0),
    "loop.max_steps": (1, 0),
    "loop.prompts_per_step": (1, 0),
    "loop.group_size": (2, 1),
    "loop.eval_every": (0, -1),
    "loop.eval_prompts": (1, 0),
    "loop.checkpoint_every": (0, -1),
    "loop.keep_checkpoints": (2, 1),
    "loop.show_completions_every": (0, -1),
    "learner.clip_low": (1.0, 1.001),
    "learner.clip_high": (1e-4, 0.0),
    "learner.learning_rate": (0.0, -1e-9),
    "learner.warmup_steps": (0, -1),
    "learner.weight_decay": (0.0, -0.1),
    "learner.max_grad_norm": (1e-3, 0.0),
    "learner.updates_per_batch": (1, 0),
    "learner.micro_batch_size": (1, 0),
    "warm_start.steps": (1, 0),
    "warm_start.batch_size": (1, 0),
    "warm_start.learning_rate": (0.0, -1e-9),
    "output.records_every": (0, -1),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_the_last_good_number_is_taken_and_the_first_bad_one_refused(key):
    good, bad = BOUNDS[key]
    recipe(**{key: good})
    assert refusal(**{key: bad}).startswith(f"{key} is {bad}: ")


@pytest.mark.parametrize(("key", "bad"), [("sampling.top_p", 0.0), ("learner.clip_low", 0.0)])
def test_zero_is_outside_a_share(key, bad):
    assert refusal(**{key: bad}).startswith(f"{key} is 0.0: ")


def test_a_whole_number_beyond_every_float_is_not_finite():
    assert refusal(kl_coef=10**400).startswith(
        "kl.coef (written kl_coef) is a number of more than 60 digits: it must be finite"
    )


def test_a_group_of_one_is_refused_with_its_reason():
    assert refusal(group_size=1) == (
        "loop.group_size (written group_size) is 1: a group of one has zero advantage everywhere, "
        "so nothing is learned. Use 2 or more (8 is the default)."
    )


def test_a_target_needs_a_controller_that_steers():
    assert refusal(kl={"target": 0.05}).startswith("kl.target is 0.05 with kl.controller fixed")
    assert recipe(kl={"target": 0.1, "controller": "ziegler"}).kl.target == 0.1
    assert refusal(kl={"target": 0, "controller": "band"}).startswith("kl.target is 0: ")


@pytest.mark.parametrize("controller", ["band", "ziegler", "log_pi"])
def test_zero_is_refused_where_it_would_be_multiplied(controller):
    assert "0 would stay 0" in refusal(kl={"coef": 0, "controller": controller})


@pytest.mark.parametrize("controller", ["fixed", "dual_ascent"])
def test_zero_is_taken_where_nothing_multiplies_it(controller):
    assert recipe(kl={"coef": 0, "controller": controller}).kl.coef == 0


@pytest.mark.parametrize("loss", SURROGATES)
def test_the_sequence_estimator_refuses_a_mean_over_each_sequence(loss):
    values = {"kl": {"estimator": "sequence"}, "loss_type": loss}
    if SURROGATES[loss].aggregation == "sequence_mean":
        assert f"kl.estimator is sequence with learner.loss {loss}" in refusal(**values)
    else:
        assert recipe(**values).learner.loss == loss


def test_the_other_estimators_go_with_every_loss():
    for estimator in ESTIMATORS:
        if estimator != "sequence":
            recipe(kl_estimator=estimator, loss_type="grpo")


def test_alpha_without_rank_is_refused():
    assert "is 32 without model.lora_rank" in refusal(**{"model.lora_alpha": 32})
    assert recipe(lora_alpha=32, lora_r=16).model.lora_rank == 16


def test_data_has_exactly_one_source():
    assert "neither data.task nor data.path" in refusal(data={})
    assert "both are set" in refusal(data={"task": "arithmetic", "path": "x"})
    assert "data.skill does not apply to data.path" in refusal(data={"path": "x", "skill": "y"})
    assert "data.map does not apply to data.task" in refusal(
        data={"task": "arithmetic", "map": "x.py:f"}
    )


def test_a_task_holds_out_its_own_questions():
    assert "eval does not apply to data.task" in refusal(eval="rows.jsonl")
    kept = {"path": "rows.jsonl", "rewards": "mine.py:f"}
    assert "retention does not apply to data.task" in refusal(retention=kept)


def test_held_out_rows_have_rewards_of_their_own():
    recipe = from_keywords(
        **FILE,
        eval={"dataset": "held_out.jsonl", "reward_funcs": ["mine.py:exact"]},
        retention={"path": "other.jsonl", "rewards": ["mine.py:known", {"function": "a:b"}]},
    ).recipe
    assert recipe.eval.path == "held_out.jsonl"
    assert recipe.eval.rewards[0].function == "mine.py:exact"
    assert [entry.function for entry in recipe.retention.rewards] == ["mine.py:known", "a:b"]


def test_a_reward_of_held_out_rows_is_checked_like_any_other():
    def refused(**section):
        with pytest.raises(ConfigError) as error:
            from_keywords(**FILE, retention={"path": "other.jsonl", **section})
        return str(error.value)

    assert "retention.rewards is missing: Reward functions for these prompts." in refused()
    assert "retention.rewards[0].function is 'binary'" in refused(rewards=["binary"])
    assert "retention.rewards[0].weight is 'x': it must be a number" in refused(
        rewards=[{"function": "a:b", "weight": "x"}]
    )


def test_a_warm_start_needs_examples():
    assert "warm_start has no examples" in refusal(data={"path": "x"}, warm_start=True)
    examples = {"path": "examples.jsonl"}
    assert from_keywords(**FILE, warm_start=examples).recipe.warm_start.path == "examples.jsonl"
    assert recipe(warm_start=True).warm_start.steps == 1000


def test_only_a_task_has_rewards_by_name():
    assert recipe(rewards=["binary"]).rewards[0].function == "binary"
    assert "rewards[1].function is 'binary'" in refusal(
        data={"path": "x"}, rewards=["a:b", "binary"]
    )


def test_a_dataset_of_ones_own_needs_a_reward():
    bare = from_keywords(**FILE).recipe
    with pytest.raises(ConfigError, match=r"data\.path is mine\.jsonl"):
        check_complete(bare)
    check_complete(bare, has_reward_functions=True)
    check_complete(from_keywords(**FILE, rewards="mine.py:f").recipe)
    check_complete(recipe())


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({}, "8 prompts x 8 completions = 64 per step, 8 micro-batches of 8"),
        (
            {"learner.micro_batch_size": 48},
            "8 prompts x 8 completions = 64 per step, 2 micro-batches of at most 48",
        ),
        (
            {"learner.micro_batch_size": 100, "num_prompts": 1},
            "1 prompt x 8 completions = 8 per step, 1 micro-batch of 8",
        ),
        (
            {"mu": 2},
            "8 prompts x 8 completions = 64 per step, 8 micro-batches of 8, 2 updates on them",
        ),
    ],
)
def test_sizes_in_words(values, sizes):
    assert recipe(**values).sizes() == sizes


def test_recipes_of_equal_settings_are_equal_however_they_were_said():
    assert recipe(kl_beta=0.01) == recipe(kl=True) == recipe(kl={"coef": 0.01})
    assert recipe(kl=True) != recipe()
    assert isinstance(recipe(), Recipe)


def test_a_teacher_is_a_section_of_its_own_and_its_path_is_enough():
    section = recipe(teacher="runs/a/start").teacher
    assert (section.path, section.coef, section.estimator, section.alone) == (
        "runs/a/start",
        1.0,
        "exact",
        False,
    )
    assert recipe(teacher_model_name_or_path="m").teacher.path == "m"
    assert recipe().teacher is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher.coef": 0.0}, "teacher.coef"),
        ({"teacher.estimator": "k1"}, "its expected gradient is zero"),
        ({"teacher.estimator": "sequence", "loss_type": "grpo"}, "teacher.estimator unbiased"),
        ({"teacher.alone": True, "reward_warmup_steps": 5}, "no gradient to warm up"),
        ({"learner.shards": 2}, "a sharded teacher is not verified"),
    ],
)
def test_impossible_settings_of_a_teacher_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**{"teacher.path": "m", **values})


def test_a_reference_that_is_the_policy_in_every_update_is_refused():
    every_step = {"kl.coef": 0.01, "reference.reset_every": 1}
    with pytest.raises(ConfigError, match=r"the KL and its gradient are 0 whatever kl\.coef is"):
        recipe(**every_step)
    for makes_sense in (
        {"learner.updates_per_batch": 2},
        {"reference.reset_every": 2},
        {"reference.on_plateau": True},
        {"kl.coef": 0.0},
    ):
        recipe(**every_step | makes_sense)
