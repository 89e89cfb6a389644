"""Supervised training before GRPO: teaches the policy the format; its result is the reference.

The result depends on the model, the examples and the settings (`warm_start.seed` among them), not
on the run's seed: runs that differ in seed or KL start from the same point, as from a published
checkpoint. It is cached.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from klinic.data.dataset import read_rows
from klinic.errors import CheckpointError, DataError, PolicyError
from klinic.evidence.files import json_bytes, sha256_of
from klinic.evidence.writing import make_fresh_folder, write_atomically
from klinic.learner.checkpoint import save_model
from klinic.learner.update import LearningRate, make_optimizer, set_learning_rate
from klinic.model.chat import PromptEncoder
from klinic.model.layout import pad_rows
from klinic.model.loading import Policy
from klinic.model.weights import digest
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import WarmStartSection
from klinic.runtime.cache import cache_folder
from klinic.runtime.interrupts import raise_if_interrupted
from klinic.tasks import catalogue
from klinic.tasks.base import Task

NUM_MICRO_BATCHES = 2  # micro-batches of a batch, by length
WARMUP_FRACTION = 0.02  # fraction of the steps with a rising learning rate
CACHE_FORMAT = 1  # increment when the result of this file changes
NUM_KEY_EXAMPLES = 64  # first examples of a task that enter the cache key
CACHE_NAME, DIGESTS_FILE = "warm_start", "complete.json"

ProgressCallback = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and the completion to imitate, as token ids."""

    prompt: np.ndarray
    completion: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWarmStart:
    """A cached model with the digests of its files."""

    folder: Path

    def is_valid(self) -> bool:
        """Whether every file exists and matches its digest."""
        try:
            digests = json.loads((self.folder / DIGESTS_FILE).read_text())
            return all(sha256_of(self.folder / name) == d for name, d in digests.items())
        except (OSError, ValueError):
            return False

    def copy_to(self, folder: Path) -> None:
        """Copy the files, and verify the digests of the copy."""
        shutil.copytree(self.folder, folder)
        if not CachedWarmStart(folder=folder).is_valid():
            raise CheckpointError(
                f"{self.folder} changed while it was copied to {folder}. Start the run again."
            )


def is_cached(policy: Policy, recipe: Recipe) -> bool:
    """Whether the warm start of this policy is in the cache."""
    assert recipe.warm_start is not None  # noqa: S101 - checked by the caller
    rows = None if recipe.warm_start.path is None else _read_examples(recipe.warm_start.path)
    return CachedWarmStart(
        folder=cache_folder(CACHE_NAME) / _cache_key(recipe, policy, rows)
    ).is_valid()


def warm_start(
    policy: Policy, recipe: Recipe, task: Task | None, progress: ProgressCallback
) -> CachedWarmStart:
    """Train the policy on examples, or take the result from the cache; return its folder."""
    assert recipe.warm_start is not None  # noqa: S101 - checked by the caller
    rows = None if recipe.warm_start.path is None else _read_examples(recipe.warm_start.path)
    cached = CachedWarmStart(folder=cache_folder(CACHE_NAME) / _cache_key(recipe, policy, rows))
    if not cached.is_valid():
        examples = (
            _shuffle_forever(rows, recipe.warm_start.seed)
            if rows is not None
            else _task_rows(task, recipe.warm_start.seed)
        )
        _train_supervised(
            policy, recipe, (_make_example(row, policy) for row in examples), progress
        )
        _store_in_cache(policy, cached)
    return cached


def _train_supervised(
    policy: Policy, recipe: Recipe, examples: Iterator[Example], progress: ProgressCallback
) -> None:
    section = recipe.warm_start
    assert section is not None  # noqa: S101
    optimizer = make_optimizer(policy.lm, weight_decay=0.0)
    rate = LearningRate(
        peak=section.learning_rate,
        schedule="cosine",
        warmup_steps=max(1, round(WARMUP_FRACTION * section.steps)),
        total_steps=section.steps,
    )
    for step in range(section.steps):
        raise_if_interrupted()
        batch = list(islice(examples, section.batch_size))
        loss = _accumulate_gradient(policy, batch)
        torch.nn.utils.clip_grad_norm_(policy.lm.parameters(), 1.0)
        set_learning_rate(optimizer, rate.at(step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, section.steps, loss)


def _accumulate_gradient(policy: Policy, batch: list[Example]) -> float:
    """Accumulate the gradient of the mean completion-token loss; return that loss."""
    num_tokens = sum(len(example.completion) for example in batch)
    # sorted by length: padding to the longest is a third of the work
    batch = sorted(batch, key=lambda example: len(example.prompt) + len(example.completion))
    total = 0.0
    size = -(-len(batch) // NUM_MICRO_BATCHES)
    for start in range(0, len(batch), size):
        micro_batch = batch[start : start + size]
        layout = pad_rows(
            [example.prompt for example in micro_batch],
            [example.completion for example in micro_batch],
            pad_id=policy.pad_id,
            device=policy.scorer.device,
        )
        loss = -policy.scorer(layout).logp.sum() / num_tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def _store_in_cache(policy: Policy, cached: CachedWarmStart) -> None:
    _refuse_non_finite(policy)
    draft = cached.folder.with_name(f"{cached.folder.name}.{os.getpid()}")
    make_fresh_folder(draft)
    save_model(draft, policy)
    digests = {path.name: sha256_of(path) for path in sorted(draft.iterdir())}
    write_atomically(draft / DIGESTS_FILE, json_bytes(digests))
    if cached.is_valid():  # another process stored the same result first
        shutil.rmtree(draft)
        return
    shutil.rmtree(cached.folder, ignore_errors=True)
    draft.rename(cached.folder)


def _refuse_non_finite(policy: Policy) -> None:
    if not all(bool(torch.isfinite(p).all()) for p in policy.lm.parameters()):
        raise PolicyError(
            "the warm start ended with non-finite weights. Lower warm_start.learning_rate."
        )


def _make_example(row: Mapping[str, Any], policy: Policy) -> Example:
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    completion = encoder.encode_text(row["completion"])
    return Example(
        prompt=np.array(encoder(row["prompt"]).token_ids, dtype=np.int64),
        completion=np.array([*completion, policy.eos_ids[0]], dtype=np.int64),
    )


def _read_examples(path: str) -> list[Mapping[str, Any]]:
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("completion"), str):
            raise DataError(
                f"{path}, row {number}: `completion` is {row.get('completion')!r}. A warm start "
                "imitates completions: give each prompt the text that should follow it."
            )
    return rows


def _shuffle_forever(rows: Sequence[Mapping[str, Any]], seed: int) -> Iterator[Mapping[str, Any]]:
    rng = np.random.Generator(np.random.Philox(seed))
    while True:
        yield from (rows[i] for i in rng.permutation(len(rows)))


def _first_examples(recipe: Recipe) -> list[Mapping[str, Any]]:
    """Return the first examples of a task; those of chess depend on the engine."""
    assert recipe.data.task is not None  # noqa: S101 - as below
    seed = 0 if recipe.warm_start is None else recipe.warm_start.seed
    return list(islice(_task_rows(catalogue.find_task(recipe.data.task), seed), NUM_KEY_EXAMPLES))


def _task_rows(task: Task | None, seed: int) -> Iterator[Mapping[str, Any]]:
    assert task is not None  # noqa: S101 - a recipe without rows and task is refused
    return task.warm_start_rows(seed)


def _cache_key(recipe: Recipe, policy: Policy, rows: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the cache key: equal for equal inputs, different for different ones."""
    inputs = {
        "format": CACHE_FORMAT,
        "torch": torch.__version__.partition("+")[0],
        "model": {"name": recipe.model.name, "dtype": recipe.model.dtype},
        "start": digest(policy.lm.state_dict()),
        "task": recipe.data.task,
        "examples": None if rows is not None else _first_examples(recipe),
        "warm_start": None if recipe.warm_start is None else _settings_of_key(recipe.warm_start),
        "rows": None if rows is None else [dict(row) for row in rows],
    }
    if policy.scorer.device.type != "cpu":
        inputs["device"] = policy.scorer.device.type
    text = json.dumps(inputs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _settings_of_key(section: WarmStartSection) -> dict[str, Any]:
    """Return the settings; seed 0 is left out, so that results cached without the key hold."""
    settings = section.model_dump()
    return settings if settings["seed"] else {k: v for k, v in settings.items() if k != "seed"}
