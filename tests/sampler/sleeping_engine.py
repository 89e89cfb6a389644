"""An engine in this process that sleeps as vLLM's does on a GPU, and records the calls.

Weights arrive over the real process group. Asleep, it generates nothing and accepts no weights; at
level 1 waking restores what it had, at level 2 its weights are lost until new ones arrive.
"""

import copy

import numpy as np
import torch

from klinic.model.adapters import load_adapter_weights
from klinic.model.layout import pad_rows
from klinic.model.weights import sampled_digest
from klinic.sampler.rollouts import GenerationOutput
from klinic.sampler.weight_group import open_group

ALL_MEMORY = {"weights", "kv_cache"}


class SleepingEngine:
    """A copy of a policy behind the engine interface."""

    num_workers = 1

    def __init__(self, policy, *, level, seeds_requests=True, restores_late=False):
        self._scorer = copy.deepcopy(policy.scorer)
        self.sleep_level = level
        self.seeds_requests = seeds_requests
        self._restores_late = restores_late
        self._awake = set(ALL_MEMORY)
        self._host_copy = None
        self._received = {}
        self.calls = []

    @property
    def _weights(self):
        return dict(self._scorer.lm.named_parameters())

    def sleep(self):
        self.calls.append("sleep")
        assert self._awake == ALL_MEMORY
        self._awake = set()
        self._host_copy = {name: p.detach().clone() for name, p in self._weights.items()}
        with torch.no_grad():
            for p in self._weights.values():
                p.fill_(torch.nan)

    def wake_up(self, what):
        self.calls.append(f"wake {what}")
        assert what not in self._awake
        self._awake.add(what)
        restored_by = "kv_cache" if self._restores_late else "weights"
        if what == restored_by and self.sleep_level == 1:
            with torch.no_grad():
                for name, p in self._weights.items():
                    p.copy_(self._host_copy[name])

    def init_weight_transfer_engine(self, init_info):
        self._group = open_group(init_info["store"], rank=1, size=init_info["size"])

    def start_weight_update(self):
        assert "weights" in self._awake, "weights were sent to an engine that sleeps"
        self.calls.append("start")

    def update_weights(self, update_info):
        for name, shape in zip(update_info["names"], update_info["shapes"], strict=True):
            self._received[name] = torch.empty(shape)
            self._group.broadcast(self._received[name], 0).wait()

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")
        with torch.no_grad():
            for name, tensor in self._received.items():
                self._weights[name].copy_(tensor)

    def received_digests(self):
        return {sampled_digest(self._received)}

    def reset_prefix_cache(self):
        self.calls.append("reset")
        assert self._awake == ALL_MEMORY

    def put_adapter(self, new, old):
        assert "weights" in self._awake, "an adapter was sent to an engine that sleeps"
        self.calls.append("adapter")
        load_adapter_weights(self._scorer.lm, new.folder)
        return True

    def seed_workers(self, seed):
        self.calls.append(f"seed {seed}")

    def close(self):
        self._group = None

    @torch.no_grad()
    def generate(self, requests, adapter):
        assert self._awake == ALL_MEMORY
        self.calls.append(f"generate {sum(one.seed is not None for one in requests)} seeds")
        tokens = [[] for _ in requests]
        outcomes = [[] for _ in requests]
        streams = [np.random.default_rng(one.seed) for one in requests]
        for _ in range(max(one.max_tokens for one in requests)):
            rows = self._next_logp([one.token_ids for one in requests], tokens)
            for row, request in enumerate(requests):
                if len(tokens[row]) == request.max_tokens or _has_ended(tokens[row], request):
                    continue
                p = rows[row].exp().double().numpy()
                chosen = int(streams[row].choice(len(p), p=p / p.sum()))
                top = rows[row].topk(request.num_top).indices.tolist()
                tokens[row].append(chosen)
                outcomes[row].append({i: float(rows[row][i]) for i in (*top, chosen)})
        return [_output(*one) for one in zip(requests, tokens, outcomes, strict=True)]

    def _next_logp(self, contexts, tokens):
        starts = [np.array([*a, *b]) for a, b in zip(contexts, tokens, strict=True)]
        any_token = [np.array([0]) for _ in starts]
        layout = pad_rows(starts, any_token, pad_id=0, device=self._scorer.device)
        return self._scorer.log_softmax(self._scorer.logits_of(self._scorer.hidden(layout)))


def _has_ended(tokens, request):
    return bool(tokens) and tokens[-1] in request.eos_ids


def _output(request, tokens, outcomes):
    return GenerationOutput(
        token_ids=tokens,
        logp=[one[token] for one, token in zip(outcomes, tokens, strict=True)],
        finish_reason="stop" if _has_ended(tokens, request) else "length",
        outcomes=outcomes,
        context=request.token_ids,
        cached_tokens=0,
    )
