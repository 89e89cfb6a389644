"""Memory of one rank of klinic's real learner on fake CUDA tensors, in a process of its own.

python rank_memory.py RECIPE NUM_RANKS [KEY=VALUE ...]

Prints as JSON the peak bytes of scoring, updating and committing of a diagnostic step, and the
bytes that the rank receives in collectives of each kind in an ordinary and in a diagnostic step.
The process group sends nothing. It shares no code with `klinic.capacity`, whose forecast is
compared with it, but the record of a step.
"""

import cuda_guard

if __name__ == "__main__":
    cuda_guard.load()

import collections
import contextlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fake_cuda
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from klinic.capacity.forecast import largest_record
from klinic.capacity.prompt_lengths import find_prompt_lengths
from klinic.learner.diagnostics import EARLY_INTERVAL
from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.model.adapters import add_lora_adapter
from klinic.model.dropout import disable_dropout
from klinic.model.frozen_base import store_base_in_bf16
from klinic.model.loading import Policy, uses_bf16_head
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer
from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.training.build import learner_settings

aten = torch.ops.aten


class RankMeter:
    """Bytes of fake CUDA storages, from their creation until they are freed or resized."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.is_paused = False
        self._sizes: dict[int, int] = {}

    def count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._free, key)
        self._set(key, storage.nbytes())

    def count_results(self, results: Any) -> None:
        for result in results if isinstance(results, list | tuple) else [results]:
            if isinstance(result, FakeTensor) and result.fake_device.type == "cuda":
                self.count(result.untyped_storage())

    def resize(self, storage: Any) -> None:
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _free(self, key: int) -> None:
        self._set(key, 0)
        del self._sizes[key]

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)


class TrafficMeter:
    """Bytes that a rank receives in collectives, by the kind of collective."""

    def __init__(self, num_ranks: int) -> None:
        self._others = (num_ranks - 1) / num_ranks
        self.received: collections.Counter[str] = collections.Counter()

    def count(self, operation: Any, args: Any) -> None:
        is_sent = operation.namespace in ("c10d", "_c10d_functional")
        if not is_sent or "wait" in operation._schema.name:
            return
        name = operation._schema.name.partition("::")[2].strip("_")
        # the whole tensor is the output of a gather, and the input of a reduction
        whole = args[1] if name == "reduce_scatter_base" else args[0]
        self.received[name] += round(self._others * count_bytes(whole))


def count_bytes(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(map(count_bytes, tensors))
    return tensors.numel() * tensors.element_size() if isinstance(tensors, torch.Tensor) else 0


@contextlib.contextmanager
def metered_ranks(num: int) -> Iterator[tuple[RankMeter, TrafficMeter]]:
    """Run a block as rank 0 of `num` on fake CUDA devices, and count memory and traffic."""
    meter, traffic, dispatch = RankMeter(), TrafficMeter(num), fake_cuda.FakeCuda.dispatch
    resize = torch.UntypedStorage.resize_
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def dispatch_counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = dispatch(self, func, types, args, kwargs)
        if not meter.is_paused:
            meter.count_results(result)
            traffic.count(func, args)
        return result

    def resize_counted(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        meter.resize(storage)
        return result

    def propagate_uncounted(self: Any, schema: Any) -> Any:
        # DTensor asks for shapes of whole tensors and makes none
        meter.is_paused, before = True, meter.is_paused
        try:
            return propagate(self, schema)
        finally:
            meter.is_paused = before

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (fake_cuda.FakeCuda, "dispatch", dispatch_counted),
            (torch.UntypedStorage, "resize_", resize_counted),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
            (torch.nn.functional, "scaled_dot_product_attention", flash_attention),
            *((torch.cuda, name, value) for name, value in IDLE_CUDA.items()),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        dist.init_process_group("fake", rank=0, world_size=num, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(fake_cuda.fake_cuda())
        yield meter, traffic


class IdleStream:
    """A stream, or an event, that does nothing."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "IdleStream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> "IdleStream":
        return self

    def do_nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = do_nothing

    def query(self) -> bool:
        return True


IDLE_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 8,
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
    "Stream": IdleStream,
    "Event": IdleStream,
    "current_stream": lambda *_: IdleStream(),
    "stream": contextlib.nullcontext,
    "synchronize": lambda *_: None,
    "_lazy_init": lambda: None,
}


def flash_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **how: Any):
    """Take the kernel that CUDA takes without a mask; fake tensors would get its matrices."""
    assert attn_mask is None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    times = query.shape[1] // key.shape[1]
    if times > 1:  # as views: the kernel copies nothing
        key, value = (
            x[:, :, None].expand(-1, -1, times, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])
            for x in (key, value)
        )
    causal, scale = how.get("is_causal", False), how.get("scale")
    if query.dtype == torch.float32:
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )[0]
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]


def build_scorer(recipe: Recipe, *, lora: bool) -> TokenScorer:
    """Return the recipe's model with a learner's dtypes, without values."""
    section = recipe.model
    config = AutoConfig.from_pretrained(section.name)
    published = config.dtype
    with torch.device("cuda"), mock.patch("transformers.PreTrainedModel.init_weights"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lm.tie_weights()  # which init_weights would do
        # fake parameters cannot be replaced in place, and are where they should be
        with mock.patch.object(torch.nn.Module, "to", keep_module), no_random_streams():
            if lora:
                lm = add_lora_adapter(lm, rank=section.lora_rank, alpha=None, seed=0)
    if lora and section.dtype == "bf16":
        with mock.patch.object(torch.nn.Module, "to", replace_parameters):
            store_base_in_bf16(lm, is_exact=lambda _: published == torch.bfloat16)
    if section.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    disable_dropout(lm)
    lm.train()
    autocast = torch.bfloat16 if section.dtype == "bf16" else None
    bf16_head = dist.get_world_size() == 1 and uses_bf16_head(lm, autocast)
    return TokenScorer(lm, temperature=1.0, autocast=autocast, bf16_head=bf16_head)


def keep_module(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    return module


def replace_parameters(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(
                parameter.detach().to(dtype), requires_grad=False
            )
    return module


@contextlib.contextmanager
def no_random_streams() -> Iterator[None]:
    with mock.patch("torch.random.fork_rng", return_value=contextlib.nullcontext()):
        yield


def build_learner(recipe: Recipe, num_ranks: int) -> LocalLearner:
    """Return rank 0 of the recipe's learner."""
    lora = recipe.model.lora_rank is not None
    scorer = build_scorer(recipe, lora=lora)
    policy = Policy(
        scorer=scorer,
        tokenizer=None,
        name="",
        eos_ids=(),
        pad_id=0,
        vocabulary_size=int(scorer.lm.get_output_embeddings().weight.shape[0]),
        trust_remote_code=False,
        context_window=None,
    )
    if lora:
        reference = Reference(scorer=scorer, kind="adapter_off", source="", digest="")
    else:
        copied = build_scorer(recipe, lora=False)
        copied.requires_grad_(False)
        reference = Reference(scorer=copied, kind="copy", source="", digest="")
    objective, settings = learner_settings(recipe)
    parts: dict[str, Any] = {"objective": objective, "settings": settings}
    if num_ranks == 1:
        return LocalLearner(policy, reference, **parts)
    return FsdpLearner(policy, reference, **parts, group=TorchProcessGroup())


def measure(recipe: Recipe, num_ranks: int) -> dict[str, dict[str, int]]:
    """Return the peaks of a diagnostic step, after an ordinary one that makes the moments.

    With them are the bytes that the rank receives in each of the two steps.
    """
    with metered_ranks(num_ranks) as (meter, traffic):
        learner = build_learner(recipe, num_ranks)
        lengths = find_prompt_lengths(recipe, window=None)
        num_rows = recipe.loop.prompts_per_step * recipe.loop.group_size
        peaks: dict[str, int] = {}
        received: dict[str, dict[str, int]] = {}

        def run(name: str, act: Callable[[], Any]) -> Any:
            meter.peak = meter.live
            result = act()
            peaks[name] = meter.peak
            return result

        for name, step in (("ordinary", 2), ("diagnostic", EARLY_INTERVAL + 1)):
            traffic.received.clear()
            record = largest_record(recipe, lengths, num_rows, step)
            scored = run("scoring", lambda: learner.score(record, needs_reference=True))  # noqa: B023
            run("updating", lambda: learner.prepare(scored, LossScales(kl_coef=0.01)))  # noqa: B023
            run("committing", learner.commit)
            del scored
            received[name] = dict(traffic.received)
    return {"peaks": peaks, **received}


if __name__ == "__main__":
    recipe_path, size, *overrides = sys.argv[1:]
    found = measure(load_recipe(Path(recipe_path), overrides).recipe, int(size))
    sys.stdout.write(json.dumps(found) + "\n")
