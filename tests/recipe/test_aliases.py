"""The names people already write: where each leads, and which have no counterpart."""

import pytest

from klinic.errors import ConfigError
from klinic.recipe import from_keywords, load_recipe
from klinic.recipe.aliases import ALIASES, FLAGS, REFUSED
from klinic.recipe.keys import is_flag, recipe_fields, recipe_sections

TASK = {"model": "tiny", "task": "arithmetic"}
KL_COEF = ("kl_coef", "kl_beta", "beta", "kl_coefficient", "init_kl_coef", "kl_penalty")


def loaded(**values):
    return from_keywords(**TASK | values)


def refusal(**values):
    with pytest.raises(ConfigError) as error:
        loaded(**values)
    return str(error.value)


def test_every_other_spelling_leads_to_a_key():
    targets = {target for target in ALIASES.values() if isinstance(target, str)}
    assert targets <= set(recipe_fields())
    assert not set(ALIASES) & (set(recipe_fields()) | set(recipe_sections()) | set(REFUSED))


@pytest.mark.parametrize("name", KL_COEF)
@pytest.mark.parametrize("spelling", [str, lambda name: name.replace("_", "-")])
def test_every_name_of_the_coefficient_sets_it(name, spelling):
    told = loaded(**{spelling(name): 0.02})
    assert told.recipe.kl.coef == 0.02
    assert told.notes[1:] == [f"{name} is written kl.coef here: 0.02"]


REWARDS = "rewards"
SAMPLES = {
    "data.path": "rows.jsonl",
    "eval.path": "rows.jsonl",
    "retention.path": "rows.jsonl",
    "rewards": "mine.py:f",
    "eval.rewards": "mine.py:f",
    "retention.rewards": "mine.py:f",
    "kl.estimator": "k3",
    "learner.loss": "grpo",
    "learner.schedule": "cosine",
    "learner.mask_truncated": True,
    "model.gradient_checkpointing": True,
    "model.name": "a/b",
    "data.task": "chess",
    "output.dir": "out",
    "model.lora_rank": 4,
    "learner.adam_beta1": 0.8,
    "learner.adam_beta2": 0.99,
    "model.lora_target_modules": ("q_proj",),
    "sampling.top_p": 0.5,
    "reference.path": "a/b",
    "recovery.lr_factor": 0.5,
    "sampling.min_p": 0.5,
    "learner.clip_low": 0.5,
    "learner.importance_sampling": "sequence_mask",
    "model.device": "cuda:1",
    "teacher.path": "runs/teacher",
    "model.attention": "eager",
    "sampler.gpu_memory_utilization": 0.3,
}


@pytest.mark.parametrize("name", [n for n, target in ALIASES.items() if isinstance(target, str)])
def test_every_other_spelling_sets_its_key(name):
    key = ALIASES[name]
    value = SAMPLES.get(key, 3)
    base = {"model.name": "tiny", "data.task": "arithmetic", "model.lora_rank": 4}
    if key.startswith(("data.path", "eval", "retention")):
        base = {"model.name": "tiny", "data.path": "x", "retention.path": "y"}
        base |= {"retention.rewards": "a:b", "eval.path": "z"}
    if key.startswith("sampler"):
        base |= {"sampler.type": "vllm"}
    if key.startswith("reference"):
        base |= {"kl.coef": 0.1}
    base.pop(key, None)
    recipe = from_keywords(**base, **{name: value}).recipe.model_dump()
    section, _, leaf = key.partition(".")
    found = recipe[section][leaf] if leaf else recipe[section]
    assert [entry["function"] for entry in found] == [value] if REWARDS in key else found == value


def test_kl_penalty_is_a_coefficient_or_an_estimator():
    assert loaded(kl_penalty=0.5).recipe.kl.coef == 0.5
    assert loaded(kl_penalty="k3").recipe.kl.estimator == "k3"
    assert loaded(kl_penalty="k3").recipe.kl.coef == 0.01
    assert "use_kl_penalty" in refusal(kl_penalty=True)
    assert "kl_penalty is 'mse'" in refusal(kl_penalty="mse")


@pytest.mark.parametrize("name", ["use_kl_penalty", "use_kl_loss"])
def test_the_switch_brings_a_kl_or_takes_it_away(name):
    assert loaded(**{name: True}).recipe.kl.coef == 0.01
    assert loaded(**{name: True}, kl_coef=0.3).recipe.kl.coef == 0.3
    assert loaded(**{name: False}).recipe.kl is None
    assert refusal(**{name: 1}) == f"{name} is 1: it must be true or false."


def test_off_wins_over_a_coefficient_and_says_so():
    told = loaded(use_kl_penalty=False, kl_coef=0.3)
    assert told.recipe.kl is None
    assert "kl is off because of use_kl_penalty: kl_coef not used" in told.notes


def test_two_switches_that_disagree_are_refused():
    assert refusal(use_kl_loss=True, use_kl_penalty=False) == (
        "use_kl_loss and use_kl_penalty contradict each other about kl. Keep one."
    )


@pytest.mark.parametrize("name", ["target_kl", "kl_target"])
def test_a_target_brings_the_band_unless_another_controller_is_chosen(name):
    told = loaded(**{name: 0.1})
    assert (told.recipe.kl.target, told.recipe.kl.controller) == (0.1, "band")
    assert told.notes[-1] == f"kl.controller is band, because {name} is set"
    chosen = loaded(**{name: 0.1, "kl.controller": "log_pi"}).recipe.kl
    assert (chosen.target, chosen.controller) == (0.1, "log_pi")
    assert "kl.controller fixed" in refusal(**{name: 0.1, "kl.controller": "fixed"})


@pytest.mark.parametrize("name", ["epsilon", "clip_range", "cliprange"])
def test_one_number_sets_both_bounds_and_an_upper_one_wins(name):
    learner = loaded(**{name: 0.1}).recipe.learner
    assert (learner.clip_low, learner.clip_high) == (0.1, 0.1)
    for values in ({name: 0.1, "epsilon_high": 0.3}, {"clip_ratio_high": 0.3, name: 0.1}):
        learner = loaded(**values).recipe.learner
        assert (learner.clip_low, learner.clip_high) == (0.1, 0.3)
    assert "both set learner.clip_low" in refusal(**{name: 0.1, "clip_ratio_low": 0.2})


@pytest.mark.parametrize(
    ("values", "mode", "cap"),
    [
        ({"vllm_importance_sampling_correction": False}, "none", 2.0),
        ({"vllm_importance_sampling_correction": True}, "sequence_mask", 2.0),
        (
            {
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_cap": 3.0,
            },
            "token_mask",
            3.0,
        ),
        ({"rollout_is": "token", "rollout_is_threshold": 5.0}, "token_truncate", 5.0),
        ({"rollout_is": "sequence"}, "sequence_truncate", 2.0),
        ({"rollout_is": None}, "none", 2.0),
        ({"tis_imp_ratio_cap": 4.0}, "token_truncate", 4.0),
        ({}, "auto", 2.0),
    ],
)
def test_importance_weights_by_the_names_of_trl_and_verl(values, mode, cap):
    learner = loaded(**values).recipe.learner
    assert (learner.importance_sampling, learner.importance_sampling_cap) == (mode, cap)


def test_a_level_that_verl_does_not_have_is_refused():
    assert "use token, sequence or null" in refusal(rollout_is="geometric")


@pytest.mark.parametrize("name", ["use_cpu", "no_cuda"])
def test_a_switch_selects_the_cpu(name):
    assert loaded(**{name: True}).recipe.model.device == "cpu"
    assert loaded(**{name: False}).recipe.model.device == "auto"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "", "cuda:0 "])
def test_what_is_no_device_is_refused(name):
    assert "Use auto, cpu, cuda, cuda:N" in refusal(**{"model.device": name})


def test_bf16_is_a_number_format():
    assert loaded(bf16=True).recipe.model.dtype == "bf16"
    assert loaded(bf16=False).recipe.model.dtype == "fp32"


@pytest.mark.parametrize("name", ["dataset", "dataset_path", "datasets", "data"])
def test_a_dataset_may_name_its_configuration_and_split(name):
    data = from_keywords(model="tiny", **{name: "owner/name,answerable,train[:100]"}).recipe.data
    assert data.path == "owner/name,answerable,train[:100]"


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_without_counterpart_is_refused_with_what_to_set(name):
    message = refusal(**{name: 1})
    assert message.startswith(f"{name} is not a key here. ")
    named = ("learner.micro_batch_size", "rewards: [{", "learner.advantage", "output.", "data.path")
    named += ("learner.importance_sampling", "learner.loss", "loop.max_steps", "klinic.train(...)")
    named += ("klinic export",)
    nothing = {"max_prompt_length", "lora_dropout", "vllm_importance_sampling_clip_min"}
    assert any(key in message for key in named) or name in nothing


def test_an_alias_and_its_key_may_agree_but_not_differ():
    assert loaded(kl_beta=0.02, **{"kl.coef": 0.02}).recipe.kl.coef == 0.02
    assert refusal(kl_beta=0.02, kl={"coef": 0.01}) == (
        "kl_beta is 0.02 and kl.coef is 0.01, but both set kl.coef. Keep one."
    )
    assert "both set learner.learning_rate" in refusal(lr=1, learning_rate=2)
    assert loaded(kl_beta=1, kl_coef=1.0).recipe.kl.coef == 1
    assert "both set kl.coef" in refusal(kl_beta=1, kl_coef=True)


def test_short_forms_of_sections():
    assert loaded(kl=0.5).recipe.kl.coef == 0.5
    assert loaded(kl=True).recipe.kl.coef == 0.01
    assert loaded(kl=False).recipe.kl is None
    assert loaded(warm_start=False).recipe.warm_start is None
    assert from_keywords(model="a/b", task="t").recipe.model.name == "a/b"


def test_no_coefficient_is_no_kl():
    assert loaded(kl_coef=None).recipe.kl is None
    assert loaded(kl={"coef": None, "estimator": "k3"}).recipe.kl is None


def test_flags_are_the_names_that_are_true_or_false(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: tiny\ntask: arithmetic\n")
    for name in FLAGS:
        load_recipe(path, [f"{name}=true"])
    assert is_flag("model.compile")
    assert not is_flag("kl.coef")
