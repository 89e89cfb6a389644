"""An engine in this process that sleeps as vLLM's does on a GPU, and records the calls.

Weights arrive over the real process group. Asleep, it generates nothing and accepts no weights; at
level 1 waking restores what it had, at level 2 its weights are lost until new ones arrive.
"""

import copy

import numpy as np
import torch

from klinic.model.adapters import load_adapter_weights
from klinic.model.layout import pad_rows
from klinic.model.tensor_prints import print_tensor
from klinic.model.weight_stream import StreamPlan
from klinic.sampler.rollouts import GenerationOutput, ReportedLogp, logp_array, token_array
from klinic.sampler.weight_group import WeightGroup

ALL_MEMORY = {"weights", "kv_cache"}


class SleepingEngine:
    """A copy of a policy behind the engine interface."""

    num_workers = 1
    dtype = "float32"

    def __init__(
        self,
        policy,
        *,
        level,
        seeds_requests=True,
        restores_late=False,
        damage=lambda name, tensor: tensor,
        rename=lambda name: name,
    ):
        """`damage` and `rename` act on each tensor on its way; None: it does not arrive."""
        self._damage, self._rename = damage, rename
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
        self._group = WeightGroup(init_info["store"], rank=1, size=init_info["size"])

    def start_weight_update(self):
        assert "weights" in self._awake, "weights were sent to an engine that sleeps"
        self._received = {}
        self.calls.append("start")

    def update_weights(self, update_info):
        for tensors in self._group.receive(StreamPlan.from_json(**update_info)):
            for name, tensor in tensors.items():
                if (arrived := self._damage(name, tensor)) is not None:
                    self._received[self._rename(name)] = arrived

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")
        with torch.no_grad():
            for name, tensor in self._received.items():
                self._weights[name].copy_(tensor)

    def received_weights(self):
        return [{name: print_tensor(p) for name, p in self._received.items()}]

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
        token_ids=token_array(tokens),
        logp=logp_array([one[token] for one, token in zip(outcomes, tokens, strict=True)]),
        finish_reason="stop" if _has_ended(tokens, request) else "length",
        top=reported_logp(outcomes),
        context=token_array(request.token_ids),
        cached_tokens=0,
    )


def reported_logp(outcomes):
    """Return log-probs by token at each position as an engine reports them."""
    entries = [(t, i, p) for t, one in enumerate(outcomes) for i, p in one.items()]
    positions, ids, logp = (np.array(column) for column in zip(*entries, strict=True))
    return ReportedLogp(positions=positions, token_ids=ids, logp=logp)
