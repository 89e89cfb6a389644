"""What each process of `test_gathers.py` does: compare gradients with those of a process alone.

python gather_ranks.py RANK SIZE FOLDER REPLICAS
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rpc_ranks import gradient_of, wound_up
from stream_checks import check_completions, check_saved_model, check_stream
from transformers import LlamaConfig, LlamaForCausalLM

from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup
from klinic.learner.local import LocalLearner
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.tiny import tiny_tokenizer
from klinic.model.weights import full_tensor, sampled_digest
from tiny_policies import drifted_reference, learner_of, own_reference, small_policy


def llama_learner(*, lora: bool) -> LocalLearner:
    """Return a learner of a Llama in bf16: GPT-2 has no linear layers of torch.

    Its micro-batches are those of a rank: kernels round products in bf16 by the number of rows.
    """
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(
        **sizes,
        **heads,
        vocab_size=len(tokenizer),
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        lm = LlamaForCausalLM(config)
        for name, p in lm.named_parameters():
            if "norm" in name:  # not numbers that bf16 holds
                p.data += 0.3 * torch.rand_like(p)
    policy = small_policy(model=lm, dtype="bf16", **({"lora_rank": 2} if lora else {}))
    reference = own_reference(policy, lora) if lora else drifted_reference(policy)
    return learner_of(policy, reference, micro_batch_size=min(3, 8 // dist.get_world_size()))


def shard(alone: LocalLearner, replicas: int) -> FsdpLearner:
    """Return this process's part of a learner."""
    return FsdpLearner(
        alone.policy,
        alone.reference,
        objective=alone.objective,
        settings=alone.settings,
        group=TorchProcessGroup(replicas=replicas),
    )


def gathered_dtypes(learner: FsdpLearner, compute: Any) -> dict[str, set[str]]:
    """Return the dtypes of the weights of norms and of linear layers while they are used."""
    dtypes: dict[str, set[str]] = {"norm": set(), "linear": set()}
    hooks = []
    for name, module in learner.policy.lm.model.layers.named_modules():
        kind = "norm" if "norm" in name else "linear"
        if module._parameters:
            hook = lambda m, _, kind=kind: dtypes[kind].add(str(m.weight.dtype))  # noqa: E731
            hooks.append(module.register_forward_pre_hook(hook))
    compute()
    for hook in hooks:
        hook.remove()
    return dtypes


def main(  # noqa: PLR0915 - all comparisons, one after another
    rank: int, size: int, folder: Path, replicas: int
) -> None:
    """Write the differences of all gradients, relative to their norms."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    differences: dict[str, float] = {}

    def compare(name: str, make: Any, estimators: Any) -> FsdpLearner:
        alone, learner = make(), shard(make(), replicas)
        for estimator in estimators:
            expected, found = gradient_of(alone, estimator), gradient_of(learner, estimator)
            assert expected.norm() > 1e-3
            difference = float((found - expected).norm() / expected.norm())
            differences[f"{name} {estimator}"] = difference
        return learner

    double = compare("double", lambda: wound_up("full", "unbiased"), ESTIMATORS)
    check_completions(double, wound_up("full", "unbiased"))
    check_stream(double, torch.float64)
    compare("double lora", lambda: wound_up("lora", "unbiased"), ("unbiased", "exact"))
    compare("bf16 lora", lambda: llama_learner(lora=True), ("unbiased",))
    learner = compare("bf16", lambda: llama_learner(lora=False), ("unbiased",))
    dtypes = gathered_dtypes(learner, lambda: gradient_of(learner, "unbiased"))
    assert dtypes == {"norm": {"torch.float32"}, "linear": {"torch.bfloat16"}}, dtypes
    assert {p.dtype for p in learner.policy.lm.parameters()} == {torch.float32}
    check_stream(learner, torch.bfloat16)
    check_saved_model(learner, folder)
    tensors = dict(learner.policy.lm.named_parameters())
    whole = {name: full_tensor(p.detach()) for name, p in tensors.items()}
    assert sampled_digest(tensors) == sampled_digest(whole)
    local = sum(p.to_local().numel() for p in tensors.values())
    if rank == 0:
        found = {
            "differences": differences,
            "fraction": local / sum(map(torch.numel, whole.values())),
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
