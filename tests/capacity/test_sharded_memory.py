"""A rank without weights takes what a real rank of two processes allocates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from klinic.capacity.forecast import forecast_memory
from klinic.capacity.meta_policy import MetaScorer
from klinic.model.scorer import TokenScorer
from klinic.model.tiny import tiny_tokenizer
from klinic.recipe.loading import load_recipe

SCRIPT = Path(__file__).parent / "shard_peaks.py"
SIZES = {
    "10M": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
HEADS = {
    "10M": {"num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 8192},
    "135M": {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
}


def write_recipe(folder: Path, size: str, **model) -> Path:
    config = LlamaConfig(
        **SIZES[size], **HEADS[size], tie_word_embeddings=size == "135M", eos_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rewards.py").write_text("def one(**_):\n    return [0.0]\n")
    rows = [json.dumps({"prompt": "1+" * 23 + f"{row}+"}) for row in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    recipe = {
        "model": {"name": str(folder / "model"), "device": "cpu", **model},
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [f"{folder}/rewards.py:one"],
        "kl": {"coef": 0.01},
        "sampling": {"max_new_tokens": 48},
        "loop": {"max_steps": 20, "prompts_per_step": 4, "group_size": 4},
        "learner": {"micro_batch_size": 4},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def measure_peaks(folder: Path, recipe: Path) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(folder), str(recipe)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-3000:]
    peaks: dict[str, int] = json.loads((folder / "peaks.json").read_text())
    return peaks


@pytest.mark.parametrize(
    ("size", "model"),
    [
        pytest.param("10M", {}, id="10M"),
        pytest.param(
            "10M",
            {"dtype": "bf16", "lora_rank": 4},
            marks=pytest.mark.slow,
            id="10M bf16 lora",
        ),
        pytest.param(
            "10M",
            {"dtype": "bf16", "gradient_checkpointing": True},
            marks=pytest.mark.slow,
            id="10M bf16",
        ),
        pytest.param("135M", {}, marks=pytest.mark.slow, id="135M"),
        pytest.param(
            "135M",
            {"dtype": "bf16", "gradient_checkpointing": True},
            marks=pytest.mark.slow,
            id="135M bf16",
        ),
    ],
)
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_rank_takes_what_a_real_one_of_two_allocates(size, model, tmp_path, monkeypatch):
    # the real ranks compute on the CPU
    monkeypatch.setattr(MetaScorer, "_rows_per_block", TokenScorer._rows_per_block)
    path = write_recipe(tmp_path, size, **model)
    measured = measure_peaks(tmp_path, path)
    forecast = forecast_memory(load_recipe(str(path), []).recipe, num_gpus=2)
    predicted = {phase.name: phase.total_bytes for phase in forecast.phases}
    (tmp_path / "ratios.txt").write_text(
        str({name: predicted[name] / measured[name] for name in measured})
    )
    highest = max(measured.values())
    assert max(predicted.values()) == pytest.approx(highest, rel=0.1)
    for name, peak in measured.items():
        assert predicted[name] == pytest.approx(peak, rel=0.1, abs=0.02 * highest), name


@pytest.mark.torch
def test_a_process_group_is_left_as_it_was(tmp_path):
    path = write_recipe(tmp_path, "10M")
    forecast_memory(load_recipe(str(path), []).recipe, num_gpus=4)
    assert not torch.distributed.is_initialized()
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
