"""What ranks assert of weights that leave their shards, and of rows that they complete together."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from klinic.learner.checkpoint import save_sharded_model
from klinic.learner.fsdp import FsdpLearner
from klinic.learner.local import LocalLearner
from klinic.model import model_writer
from klinic.model.tensor_prints import describe_damage, print_tensor
from klinic.model.weight_stream import WeightStream
from klinic.model.weights import full_tensor
from klinic.sampler.random_streams import RandomStream
from klinic.sampler.rollouts import TurnRequest
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from klinic.training.sharded_sampler import complete_turns


def check_stream(learner: FsdpLearner, dtype: torch.dtype) -> None:
    """Assert that rank 0 gets every tensor whole, and fingerprints of all of them."""
    tensors = dict(learner.policy.lm.named_parameters())
    whole = {name: full_tensor(p.detach()).to(dtype) for name, p in tensors.items()}
    stream = WeightStream(tensors, dtype=dtype, bucket_bytes=5000)
    arrived = stream.collect()
    assert len(list(stream.plan.buckets())) > 3
    for name, p in arrived.items():
        assert torch.equal(p, whole[name]), name
    if dist.get_rank() == 0:
        assert list(arrived) == list(tensors)
        prints = {name: print_tensor(p) for name, p in arrived.items()}
        assert describe_damage(stream.fingerprints, [prints]) == ""


def check_saved_model(learner: FsdpLearner, folder: Path) -> None:
    """Assert that a model is saved as it is, streamed to several files, and by transformers."""
    lm: Any = learner.policy.lm
    tensors = dict(lm.named_parameters())
    whole = {name: full_tensor(p.detach()) for name, p in tensors.items()}
    for by_stream in (True, False):
        policy = replace(learner.policy, has_tensors_of_files=by_stream)
        place = folder / f"saved {by_stream}"
        with mock.patch.object(model_writer, "FILE_BYTES", 20_000):
            save_sharded_model(place, policy)
        if dist.get_rank() == 0:
            assert len(list(place.glob("*.safetensors"))) > 3 or not by_stream
            saved = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
            for name, p in saved.named_parameters():
                assert torch.equal(p, whole[name]), name


def check_completions(learner: FsdpLearner, alone: LocalLearner) -> None:
    """Assert that ranks complete rows as one process does, whoever has how many of them."""
    for num in (1, 2, 7):
        turns = [
            TurnRequest(
                context=np.arange(3, 5 + row % 3),
                numbers=RandomStream(seed=1, step=2, prompt=row, sample=0, num=3 + 2 * row),
            )
            for row in range(num)
        ]
        params = SamplingParams(temperature=0.9)
        streams = complete_turns(learner, turns=turns, params=params)
        settings = {"max_new_tokens": 9, "group_size": 1, "seed": 1}
        sampler = TransformersSampler(alone.policy, params=params, **settings)
        for row, stream in sampler._complete_turns(turns):
            assert streams[row].token_ids == stream.token_ids
            assert streams[row].finish_reason == stream.finish_reason
            difference = np.array(streams[row].logp) - np.array(stream.logp)
            assert np.abs(difference).max() < 1e-12
