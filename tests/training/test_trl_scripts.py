"""`klinic.train(...)` takes the arguments of public TRL scripts, and trains.

The model and the data are tiny ones, and settings that need a GPU, an engine or an account are
replaced: the device, the sampler, the attention kernel and the trackers; steps and tokens are few.
All other arguments are those of the script.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from trl_scripts import ADAPTED_MODEL, CALLBACK, HELD_OUT, MODEL, SCRIPTS, TOKENIZER, TOOL

import klinic
from klinic.errors import ConfigError
from klinic.training import api
from klinic.training.result import Result

NUM_ROWS = 80
TINY = {
    "output_dir": "out",
    "max_steps": 2,
    "max_completion_length": 4,
    "use_vllm": False,
    "use_cpu": True,
    "report_to": "none",
    "attn_implementation": "auto",
    "loop.eval_prompts": 2,
}
UNAVAILABLE = {"examples/scripts/grpo_agent.py": ("tools is not available", "chat_template_kwargs")}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(script):
    text = [{"role": "user", "content": "1+1="}] if script.chat else "1+1="
    return [{"prompt": text, **dict.fromkeys(script.columns, "2")} for _ in range(NUM_ROWS)]


def reward(name, columns):
    def function(completions, **others):
        assert set(columns) <= set(others)
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(len(set(text)) + len(name) % 3) for text in texts]

    function.__name__ = name
    return function


def model_of(script):
    from klinic.model.tiny import build_built_in_model

    if script.model == MODEL:
        return "tiny", None
    lm, tokenizer = build_built_in_model("tiny", seed=0)
    if script.model == ADAPTED_MODEL:
        from peft import LoraConfig, get_peft_model

        lm = get_peft_model(lm, LoraConfig(**script.lora))
    return lm, tokenizer


def callback():
    from transformers import TrainerCallback

    class OnSave(TrainerCallback):
        steps: list[int] = []  # noqa: RUF012 - of this class alone

        def on_save(self, args, state, control, **kwargs):
            assert kwargs["model"] is not None
            self.steps.append(state.global_step)

    return OnSave()


def arguments(script):
    """Return the arguments of a script, with its objects made for the tiny model."""
    from peft import LoraConfig

    model, tokenizer = model_of(script)
    objects = {HELD_OUT: rows(script)[:2], TOKENIZER: tokenizer, CALLBACK: callback(), TOOL: print}
    keywords = {
        name: [objects[v] for v in value] if isinstance(value, list) else objects.get(value, value)
        for name, value in script.trainer.items()
    }
    if script.lora is not None and script.model != ADAPTED_MODEL:
        keywords["peft_config"] = LoraConfig(**script.lora)
    if tokenizer is not None:
        keywords["processing_class"] = tokenizer
    rewards = [reward(name, script.columns) for name in script.rewards]
    return keywords | {
        "model": model,
        "reward_funcs": rewards if len(rewards) > 1 else rewards[0],
        "train_dataset": rows(script),
        "args": script.config,
    }


every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: f"{s.repository}/{s.path}")


@every_script
def test_the_arguments_of_a_public_script_make_a_recipe(script, monkeypatch):
    recipes = []

    def record(recipe, *, inputs, **_):
        recipes.append((recipe, inputs))
        return Result(folder=Path("out"), step=0, before={}, after={}, signal=None)

    monkeypatch.setattr(api, "train_recipe", record)
    if script.path in UNAVAILABLE:
        with pytest.raises(ConfigError, match="tools is not available"):
            klinic.train(**arguments(script), **TINY)
        return
    klinic.train(**arguments(script), **TINY)
    ((recipe, inputs),) = recipes
    config = script.config or {}
    assert recipe.loop.max_steps == 2
    assert [one.__name__ for one in inputs.reward_functions] == script.rewards
    assert recipe.loop.group_size == config.get("num_generations", 8)
    assert (recipe.kl.coef if recipe.kl else 0.0) == config.get("beta", 0.0)
    if script.lora is not None and script.model != ADAPTED_MODEL:
        assert recipe.model.lora_rank == script.lora["r"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@every_script
def test_a_public_script_trains_with_its_own_arguments(script, capfd):
    if script.path in UNAVAILABLE:
        with pytest.raises(ConfigError) as error:
            klinic.train(**arguments(script), **TINY)
        assert all(part in str(error.value) for part in UNAVAILABLE[script.path])
        return
    given = arguments(script)
    result = klinic.train(**given, **TINY)
    assert result.step == 2
    assert [entry["step"] for entry in result.history if "loss" in entry] == [1, 2]
    names = script.rewards
    assert {f"rewards/{name}/mean" for name in names} <= result.metrics.keys()
    model, tokenizer = result.load_model()
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert hasattr(model, "peft_config") == (script.lora is not None)
    if "callbacks" in given:
        assert given["callbacks"][0].steps == [2]


def test_nine_of_ten_scripts_train_unchanged():
    assert len(SCRIPTS) == 10
    assert len(UNAVAILABLE) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_config_object_and_its_keywords_make_the_same_steps():
    from trl import GRPOConfig

    config = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "num_train_epochs": 0.05,
        "beta": 0.04,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "temperature": 0.9,
        "seed": 0,
        "gradient_checkpointing": False,
        "bf16": False,
    }
    script = replace(SCRIPTS[1], config=config, lora=None)
    sizes = {name: value for name, value in TINY.items() if name not in ("max_steps", "output_dir")}
    results = []
    for number, args in enumerate((config, GRPOConfig("unused", use_cpu=True, **config))):
        given = arguments(script) | {"args": args}
        results.append(klinic.train(**given, **sizes, output_dir=f"run-{number}"))
    by_keywords, by_object = ([e.get("loss") for e in result.history] for result in results)
    assert by_keywords == by_object
    assert results[0].step == 2  # 0.05 epochs of 80 rows, 2 prompts a step
