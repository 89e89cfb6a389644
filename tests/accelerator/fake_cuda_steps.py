"""Prints the waits, copies and kernels of learners on a CUDA device without numbers, as JSON."""

import cuda_guard

if __name__ == "__main__":
    cuda_guard.load()

import itertools
import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import fake_cuda
import numpy as np
import torch
from device_faults import a_read_in_every_chunk
from host_reads import HostReads
from transformers import LlamaConfig, LlamaForCausalLM

from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.learner.objective import LossTargets, loss_targets, loss_terms
from klinic.learner.protocol import LossScales
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.surrogate import SURROGATES
from klinic.model import head as head_module
from klinic.model import scorer as scorer_module
from klinic.model.adapters import add_lora_adapter
from klinic.model.dropout import disable_dropout
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer
from klinic.model.tiny import tiny_tokenizer
from klinic.model.token_scores import TokenScores
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.token_sampling import SamplingParams
from klinic.training.evaluation import kl_to_reference
from tiny_policies import LOSSES_AND_ESTIMATORS, batch_of, learner_of

VOCABULARY = 152_064
ORDINARY_STEP = 12  # without the extra passes of a diagnostic step


def make_scorer(*, lora: bool) -> TokenScorer:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        lm = LlamaForCausalLM(config)
        if lora:  # fake parameters cannot be replaced, and are on the device already
            with mock.patch.object(torch.nn.Module, "to", lambda self, *_, **__: self):
                lm = add_lora_adapter(lm, rank=4, alpha=None, seed=0)
    disable_dropout(lm)
    lm.train()
    return TokenScorer(lm, temperature=1.0, autocast=torch.bfloat16, bf16_head=True)


def make_policy(*, lora: bool) -> tuple[Policy, Reference]:
    scorer = make_scorer(lora=lora)
    policy = Policy(
        scorer=scorer,
        tokenizer=tiny_tokenizer(),
        name="fake",
        eos_ids=(2,),
        pad_id=0,
        vocabulary_size=VOCABULARY,
        trust_remote_code=False,
        context_window=None,
    )
    if lora:
        return policy, Reference(scorer=scorer, kind="adapter_off", source="", digest="")
    frozen = make_scorer(lora=False).requires_grad_(False)
    return policy, Reference(scorer=frozen, kind="copy", source="", digest="")


def completions(num_rows: int, num_tokens: int) -> list[Rollout]:
    """Return rows of nearly equal length in groups of four."""
    return [
        Rollout(
            prompt=Prompt(index=row // 4, text="", token_ids=np.arange(3, 11), columns={}),
            sample=row % 4,
            segments=(
                Segment(
                    token_ids=np.arange(num_tokens - row % 2) % VOCABULARY,
                    emitted_by=EmittedBy.POLICY,
                    logp_sampler=-np.ones(num_tokens - row % 2, dtype=np.float32),
                    weight_version=0,
                ),
            ),
            finish_reason="stop",
            text="",
        )
        for row in range(num_rows)
    ]


def count(work):
    with HostReads() as counted:
        work()
    return {
        "own": dict(counted.own),
        "of_libraries": dict(counted.of_libraries),
        "uploads": dict(counted.uploads),
        "kernels": dict(counted.kernels),
    }


def step(learner, record):
    """Return the counts of the learner's part of a step, and its micro-batches."""
    batches = []

    def work():
        learner.all_finite()
        scored = learner.score(record, needs_reference=True)
        learner.prepare(scored, LossScales(kl_coef=0.01))
        learner.commit()
        learner.all_finite()
        batches.extend(scored.batches)

    return count(work) | {"batches": len(batches)}


def all_steps(cases, num_rows):
    """Yield the counts of a step for each loss, estimator, and full or LoRA."""
    policies = {lora: make_policy(lora=lora) for lora in {lora for *_, lora in cases}}
    record = batch_of(completions(num_rows, 24), step=ORDINARY_STEP)
    for loss, estimator, lora in cases:
        learner = learner_of(*policies[lora], micro_batch_size=4, loss=loss, estimator=estimator)
        name = f"{loss}, {estimator}, {'LoRA' if lora else 'full'}"
        yield name, step(learner, record)


def other_parts(kinds):
    """Yield the counts of sampling, evaluation and probes."""
    rows = [{"prompt": text} for text in ("12+7=", "copy abc")]
    for lora in kinds:
        policy, reference = make_policy(lora=lora)
        kind = "LoRA" if lora else "full"
        for name, params in (
            ("sampling", SamplingParams(top_p=0.9, top_k=50)),
            ("greedy", SamplingParams(temperature=0.0)),
        ):
            streams = [Stream(context=np.arange(3, n), uniforms=np.zeros(3)) for n in (8, 8, 6)]
            policy.lm.eval()
            yield (
                f"{name}, {kind}",
                count(
                    lambda s=streams, p=params, scorer=policy.scorer: list(
                        decode(scorer, s, params=p, eos_ids=frozenset(), pad_id=0)
                    )
                ),
            )
            policy.lm.train()
        yield (
            f"evaluation, {kind}",
            count(lambda p=policy, ref=reference: kl_to_reference(p, ref, rows, max_new_tokens=3)),
        )
        learner = learner_of(policy, reference, micro_batch_size=4)
        record = batch_of(completions(2, 6), step=1)
        yield f"probe, {kind}", count(lambda one=learner, r=record: one.probe(r, kl_coef=0.01))


def long_rows(policy, reference, lengths=(44, 88)):
    """Return the counts of a step for one micro-batch of 1 and of 2 chunks of logits, by length."""
    found = {}
    for num_tokens in lengths:
        learner = learner_of(policy, reference, micro_batch_size=4)
        found[num_tokens] = step(learner, batch_of(completions(4, num_tokens), step=ORDINARY_STEP))
    return found


def losses():
    """Return the waits in the loss and its gradient for every pair of loss and estimator."""
    record = batch_of(completions(8, 24), step=ORDINARY_STEP)
    policy, reference = make_policy(lora=True)

    def column():
        return torch.zeros(record.num_tokens, device="cuda", requires_grad=True)

    def differentiate(targets, objective):
        constants = {"entropy": column().detach(), "rank": column().detach().long()}
        scores = TokenScores(logp=column(), kl_exact=column(), kl_topk=column(), **constants)
        loss_terms(scores, targets, objective).total_loss(kl_coef=0.1, teacher_coef=0.0).backward()

    found, targets_of = {}, {}
    for loss, estimator in LOSSES_AND_ESTIMATORS:
        objective = learner_of(policy, reference, loss=loss, estimator=estimator).objective
        if loss not in targets_of:
            columns = {name: column().detach() for name in ("logp_ref", "kl_baseline")}
            targets_of[loss] = replace(loss_targets(record, objective, column()), **columns)
        counts = count(lambda one=objective, t=targets_of[loss]: differentiate(t, one))
        found[f"{loss}, {estimator}"] = counts["own"]
    return found


def each_estimator_once():
    """Return each estimator with one of the losses, in turn full and with LoRA."""
    pairs = zip(ESTIMATORS, itertools.cycle(SURROGATES), strict=False)
    kinds = itertools.cycle((False, True, True, False))  # every loss with both over the estimators
    return [
        ("dr_grpo" if (loss, name) not in LOSSES_AND_ESTIMATORS else loss, name, lora)
        for (name, loss), lora in zip(pairs, kinds, strict=False)
    ]


@contextmanager
def a_loop_over_tokens():
    def one_by_one(logp_all):
        return torch.stack([logp.sum() for logp in logp_all])

    with mock.patch.object(scorer_module, "entropy", one_by_one):
        yield


def mixed_devices(policy, reference):
    """Return the error of a step whose advantages stayed on the host."""
    plain = LossTargets.select_batch

    def on_host(self, batch):
        targets = plain(self, batch)
        return replace(targets, advantage=targets.advantage.cpu())

    with mock.patch.object(LossTargets, "select_batch", on_host):
        try:
            step(learner_of(policy, reference), batch_of(completions(4, 8), step=ORDINARY_STEP))
        except RuntimeError as error:
            return str(error)
    return "no error"


def head_products(policy, reference):
    """Return the number of bf16 products of the head in a step, and the dtype of the logits."""
    plain = head_module.multiply_bf16
    record = batch_of(completions(4, 8), step=ORDINARY_STEP)
    with mock.patch.object(head_module, "multiply_bf16", wraps=plain) as products:
        step(learner_of(policy, reference), record)
        logits = policy.scorer.head(torch.zeros(3, 64, device="cuda"))
    return {"num": products.call_count, "dtype": str(logits.dtype)}


def matrix():
    pairs = [pair for pair in LOSSES_AND_ESTIMATORS if pair[1]]
    return [(*pair, lora) for pair, lora in itertools.product(pairs, (False, True))]


def main(what: str):
    if what == "matrix":
        return {
            "steps": dict(all_steps(matrix(), num_rows=8)),
            "parts": dict(other_parts((False, True))),
        }
    policy, reference = make_policy(lora=False)
    found = {
        "mixed": mixed_devices(policy, reference),
        "head": head_products(policy, reference),
    }
    for name, fault, lengths in (
        ("long", nullcontext, (44, 88)),
        ("loop", a_loop_over_tokens, (44, 88)),
        ("read", a_read_in_every_chunk, (88,)),
    ):
        with fault():
            found[name] = long_rows(policy, reference, lengths)
    return found | {
        "losses": losses(),
        "steps": dict(all_steps(each_estimator_once(), num_rows=4)),
        "parts": dict(other_parts((False,))),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with fake_cuda.fake_cuda():
        found = main(sys.argv[1])
    sys.stdout.write(json.dumps(found))
