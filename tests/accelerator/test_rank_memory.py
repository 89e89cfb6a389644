"""`--dry-run` against a meter of fake CUDA tensors that counts each rank of the real learner."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoConfig, LlamaConfig

from klinic.capacity.bytes_moved import gathered_bytes
from klinic.capacity.flops import StepSizes, dense_shape
from klinic.capacity.forecast import forecast_memory
from klinic.recipe.loading import load_recipe

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
GIB = 2**30
QWEN_7B = str(HERE.parents[1] / "recipes" / "shapes" / "qwen2.5-7b-instruct")
LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "dtype": "bfloat16"}
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
}


def write_model(folder: Path, name: str, *, is_tied: bool = False, **changes: int) -> str:
    if name == "7B":
        return QWEN_7B
    sizes = MODELS[name] | changes
    heads = sizes["hidden_size"] // 128
    config = LlamaConfig(**sizes, **LLAMA, num_attention_heads=heads, tie_word_embeddings=is_tied)
    config.save_pretrained(folder / name)
    return str(folder / name)


def write_recipe(folder: Path, model: dict, *, prompt: int, completion: int, rows: int, batch: int):
    # without a tokenizer a token is assumed for every 3 characters
    prompts = [{"prompt": "x" * (3 * prompt - 3) + f"{row:03}"} for row in range(rows // 2)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "rewards.py").write_text("def one(**_):\n    return [0.0]\n")
    recipe = {
        "model": {"dtype": "bf16", "gradient_checkpointing": True, **model},
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [f"{folder}/rewards.py:one"],
        "kl": {"coef": 0.01},
        "sampling": {"max_new_tokens": completion},
        "sampler": {"type": "vllm"},
        "loop": {"max_steps": 20, "prompts_per_step": rows // 2, "group_size": 2},
        "learner": {"micro_batch_size": batch},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def measure(recipe: Path, num_ranks: int, *overrides: str) -> dict[str, dict[str, int]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_memory.py"), str(recipe), str(num_ranks), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(recipe: Path, num_ranks: int) -> int:
    """Assert that the forecast is within 5% of the meter; return the highest peak."""
    found = measure(recipe, num_ranks)
    measured = found["peaks"]
    forecast = forecast_memory(load_recipe(recipe, []).recipe, num_gpus=num_ranks)
    predicted = {phase.name: phase.total_bytes for phase in forecast.phases}
    assert predicted.keys() == measured.keys()
    highest = max(measured, key=lambda name: measured[name])
    (recipe.parent / "peaks.json").write_text(json.dumps({"meter": measured, "said": predicted}))
    assert max(predicted.values()) == pytest.approx(measured[highest], rel=0.05)
    if num_ranks > 1:
        compare_traffic(recipe, found, num_ranks)
    return measured[highest]


def compare_traffic(recipe: Path, found: dict[str, dict[str, int]], num_ranks: int) -> None:
    """Assert that the formula has the bytes that a rank received, but for sums and norms."""
    resolved = load_recipe(recipe, []).recipe
    config = AutoConfig.from_pretrained(resolved.model.name)
    shape = dense_shape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        vocabulary=config.vocab_size,
    )
    loop, completion = resolved.loop, resolved.sampling.max_new_tokens
    sizes = StepSizes(
        prompts=loop.prompts_per_step,
        group=loop.group_size,
        prompt_length=1,
        completion_length=completion,
        micro_batch=resolved.learner.micro_batch_size,
        reference=True,
    )
    for step, split in (("ordinary", 0), ("diagnostic", 1)):
        expected = gathered_bytes(
            shape, replace(sizes, split_gradient_fraction=split), num=num_ranks
        )
        assert sum(found[step].values()) == pytest.approx(expected, rel=1e-3)


def test_the_forecast_of_a_rank_is_what_the_meter_counts(tmp_path):
    model = write_model(tmp_path, "8B", num_hidden_layers=2)
    recipe = write_recipe(tmp_path, {"name": model}, prompt=64, completion=256, rows=8, batch=1)
    compare(recipe, 4)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 16])
def test_a_tied_head_on_one_gpu(tmp_path, lora_rank):
    model = {
        "name": write_model(tmp_path, "8B", is_tied=True, num_hidden_layers=2),
        "lora_rank": lora_rank,
    }
    recipe = write_recipe(tmp_path, model, prompt=64, completion=256, rows=4, batch=1)
    compare(recipe, 1)


class Shape(NamedTuple):
    """A model, the number of its ranks, and the GiB that a rank may take."""

    model: str
    num_ranks: int
    lengths: tuple[int, int]
    micro_batch: int = 1
    lora_rank: int | None = None
    most: float | None = None


SHAPES = {
    "7B LoRA on 1": Shape("7B", 1, (512, 512), 4, 16, most=20),
    "7B LoRA long on 1": Shape("7B", 1, (512, 2048), 1, 16),
    "7B LoRA on 8": Shape("7B", 8, (512, 512), 4, 16),
    "8B on 8": Shape("8B", 8, (512, 8192), most=40),
    "8B on 64": Shape("8B", 64, (512, 8192)),
    "70B on 64": Shape("70B", 64, (1024, 8192), most=72),
    "70B on 512": Shape("70B", 512, (1024, 8192), most=40),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_large_models_fit(name, tmp_path):
    shape = SHAPES[name]
    model = {"name": write_model(tmp_path, shape.model), "lora_rank": shape.lora_rank}
    recipe = write_recipe(
        tmp_path,
        model,
        prompt=shape.lengths[0],
        completion=shape.lengths[1],
        rows=2 * shape.num_ranks * shape.micro_batch,
        batch=shape.micro_batch,
    )
    peak = compare(recipe, shape.num_ranks)
    assert shape.most is None or peak <= shape.most * GIB


RECIPES = {
    "qwen2.5-3b-lora-24gb": ("qwen2.5-3b-instruct", 1, 24),
    "qwen2.5-7b-lora-8gpu": ("qwen2.5-7b-instruct", 8, 80),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_gpus_fits_the_card_of_its_name(name):
    shape, num_ranks, gigabytes = RECIPES[name]
    recipes = HERE.parents[1] / "recipes"
    overrides = [f"model.name={recipes / 'shapes' / shape}"]
    measured = measure(recipes / f"{name}.yaml", num_ranks, *overrides)["peaks"]
    recipe = load_recipe(recipes / f"{name}.yaml", overrides).recipe
    forecast = forecast_memory(recipe, num_gpus=num_ranks)
    predicted = max(phase.total_bytes for phase in forecast.phases)
    assert predicted == pytest.approx(max(measured.values()), rel=0.05)
    assert predicted < 0.9 * gigabytes * 1e9
