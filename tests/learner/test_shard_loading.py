"""Ranks that load their own rows of safetensors files have the weights of a whole load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from klinic.model.adapter_files import save_adapter
from klinic.model.adapters import TRAINED_ADAPTER, add_lora_adapter
from klinic.model.skeleton import build_skeleton, placeholder_values
from klinic.model.tiny import build_built_in_model, tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
AT_WORK = Path(__file__).parent / "load_ranks.py"
MEMORY = Path(__file__).parent / "load_memory.py"


def run_ranks(script: Path, size: int, folder: Path, *more: str) -> list[str]:
    """Run a script once for each rank; return what the ranks print."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(folder), *more],
            env=env,
            **pipes,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate() for rank in ranks]
    errors = "\n".join(error[-3000:] for _, error in outputs)
    assert [rank.returncode for rank in ranks] == [0] * size, errors
    return [output for output, _ in outputs]


def save_llama(
    folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "10KB", **config: Any
) -> Path:
    """Save a Llama of odd sizes, which no number of ranks divides, in several files."""
    tokenizer = tiny_tokenizer()
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "attention_bias": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        lm = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).to(dtype)
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
    lm.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def save_adapted(base: Path, folder: Path) -> Path:
    """Save an adapter that does not start at 0."""
    lm = add_lora_adapter(LlamaForCausalLM.from_pretrained(base), rank=2, alpha=None, seed=3)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for name, p in lm.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn_like(p))
    save_adapter(lm, folder, adapter=TRAINED_ADAPTER)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def case(name: Path | str, *, is_whole: bool = False, **settings: Any) -> dict[str, Any]:
    return {"settings": {"model": str(name), **settings}, "is_whole": is_whole}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    tied = save_llama(folder / "tied", tie_word_embeddings=True)
    own_head = save_llama(folder / "own", tie_word_embeddings=False)
    bf16 = save_llama(folder / "bf16", dtype=torch.bfloat16, tie_word_embeddings=False)
    gpt2, tokenizer = build_built_in_model("tiny-gpt2", seed=0)
    gpt2.transformer.save_pretrained(folder / "gpt2")  # its names lack the decoder's prefix
    tokenizer.save_pretrained(folder / "gpt2")
    adapter = save_adapted(tied, folder / "adapter")
    lora = {"model.lora_rank": 2}
    return {
        "tied": case(tied),
        "own head, checkpointing": case(own_head, **{"model.gradient_checkpointing": True}),
        "another reference": case(tied, **{"reference.path": str(own_head)}),
        "fresh adapter": case(tied, **lora),
        "trained adapter": case(adapter),
        "bf16 base below an adapter": case(bf16, **lora, **{"model.dtype": "bf16"}),
        "fp32 base that bf16 does not hold": case(own_head, **lora, **{"model.dtype": "bf16"}),
        "GPT-2": case(folder / "gpt2"),
        "a model that klinic builds": case("tiny", is_whole=True),
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_load_the_weights_of_a_process_alone(cases, size, tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_ranks(AT_WORK, size, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_together_load_little_more_than_one_model_and_reference(size, tmp_path):
    small = save_llama(tmp_path / "small", tie_word_embeddings=False)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 22}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    large = save_llama(
        tmp_path / "large", **sizes, **heads, vocab_size=32000, tie_word_embeddings=False,
        dtype=torch.bfloat16, initializer_range=0.02, max_shard_size="300MB",
    )  # fmt: skip
    outputs = run_ranks(MEMORY, size, tmp_path, str(small), str(large))
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    added = [rank["peak"] - rank["baseline"] for rank in ranks]
    assert sum(added) <= 1.2 * ranks[0]["whole"], ranks
    assert added[0] <= 1.05 * max(added[1:]), ranks


def test_a_skeleton_has_no_values_but_its_buffers(tmp_path):
    folder = save_llama(tmp_path / "llama", tie_word_embeddings=True)
    skeleton = build_skeleton(str(folder), trust_remote_code=False)
    lm, whole = skeleton.lm, LlamaForCausalLM.from_pretrained(folder)
    assert {p.device.type for p in lm.parameters()} == {"meta"}
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    expected = dict(whole.named_buffers())
    assert expected.keys() == dict(lm.named_buffers()).keys() != set()
    for name, buffer in lm.named_buffers():
        assert torch.equal(buffer, expected[name])
    assert lm.generation_config.eos_token_id == whole.generation_config.eos_token_id
    with placeholder_values(lm):
        assert {p.device.type for p in lm.parameters()} == {"cpu"}
        assert sum(p.untyped_storage().nbytes() for p in lm.parameters()) < 1000
    assert {p.device.type for p in lm.parameters()} == {"meta"}
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


def test_a_model_whose_files_lack_a_tensor_has_no_skeleton(tmp_path):
    folder = save_llama(tmp_path / "llama", tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert build_skeleton(str(folder), trust_remote_code=False) is None


def test_linear_modules_without_values_share_nothing_by_accident(tmp_path):
    folder = save_llama(tmp_path / "llama", tie_word_embeddings=False)
    lm = build_skeleton(str(folder), trust_remote_code=False).lm
    with placeholder_values(lm):
        pass
    assert len({id(p) for p in lm.parameters()}) == len(list(lm.named_parameters()))
