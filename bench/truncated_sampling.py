"""`python -m bench.truncated_sampling --out DIR`: the KL under top-p, on tokens of real runs.

    python -m bench.truncated_sampling --out runs/truncated

For each top_p, the arithmetic recipe is trained with a KL controller. At the prefixes of its last
records, the expectation over the whole vocabulary of the default estimator's gradient (with respect
to the logits) is compared with the gradient of the stated objective: the KL between policy and
reference, both restricted to the tokens that the sampler keeps. The same for a learner that scores
the untruncated distribution. The logged KL and the controller's target are compared with the exact
KL at the same prefixes.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.arithmetic_runs import column, make, markdown
from klinic.evidence import store
from klinic.maths.kl_estimators import kl_term
from klinic.maths.kl_inputs import KLInputs
from klinic.model.layout import TokenTargets
from klinic.model.token_filters import KeptTokens, TokenFilters, filter_mask

TOP_P = (0.95, 0.9, 0.8)
STEPS, NUM_LAST = 400, 10
TARGET = 0.05  # nats per token
MIN_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Logits of policy and reference at the prefixes of recorded tokens, in float64."""

    policy: Tensor
    reference: Tensor


def recorded_logits(run: Path) -> Logits:
    """Score the prefixes of the last records with the last policy and the reference."""
    last = run / "checkpoints" / f"step={STEPS:06d}" / "model"
    folders = (last, run / "start")
    models = [AutoModelForCausalLM.from_pretrained(f).double().eval() for f in folders]
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in range(STEPS - NUM_LAST + 1, STEPS + 1):
        record = store.read_record(run, step)
        assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
        prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
        rows = np.split(record.token_ids, record.row_offsets[1:-1])
        for prompt, row in zip(prompts, rows, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, row]))[None]
            at = slice(len(prompt) - 1, ids.shape[1] - 1)
            with torch.no_grad():
                for part, model in zip(parts, models, strict=True):
                    part.append(model(ids).logits[0, at])
    return Logits(policy=torch.cat(parts[0]), reference=torch.cat(parts[1]))


def expected_gradient(logits: Logits, keep: Tensor, *, restrict: bool) -> Tensor:
    """Return the expectation of the gradient of `unbiased` over the truncated sampler's tokens."""
    rows, tokens = keep.nonzero(as_tuple=True)
    kept = KeptTokens.from_mask(keep)
    targets = TokenTargets(ids=torch.empty(0, dtype=torch.int64), kept=kept if restrict else None)
    sampled = TokenTargets(ids=targets.ids, kept=kept).restrict_logits(logits.policy)
    sampled_logp = sampled.log_softmax(-1)[rows, tokens]
    leaf = logits.policy.clone().requires_grad_()
    logp = targets.restrict_logits(leaf).log_softmax(-1)[rows, tokens]
    logp_ref = targets.restrict_logits(logits.reference).log_softmax(-1)[rows, tokens]
    num = len(rows)
    inputs = KLInputs(
        group=torch.zeros(num, dtype=torch.int64),
        row_offsets=torch.arange(num + 1),
        logp=logp,
        logp_old=logp.detach(),
        logp_sampler=sampled_logp,
        logp_ref=logp_ref,
        loss_mask=torch.ones(num, dtype=torch.bool),
    )
    terms = kl_term("unbiased", inputs, aggregation="constant")
    (gradient,) = torch.autograd.grad((sampled_logp.exp() * terms).sum(), leaf)
    return gradient


def exact_kl(logits: Logits, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL between the restricted distributions at every prefix, and its gradient."""
    leaf = logits.policy.clone().requires_grad_()
    logp, logp_ref = (x.masked_fill(~keep, -1e9).log_softmax(-1) for x in (leaf, logits.reference))
    kl = (logp.exp() * (logp - logp_ref)).sum(-1)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    return kl.detach(), gradient


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to that of the expected gradient."""
    return float((actual - expected).norm() / expected.norm())


def row(out: Path, top_p: float) -> tuple[str, ...]:
    """Return the figures of one top_p."""
    run = out / f"top_p-{100 * top_p:.0f}"
    make(
        run,
        f"sampling.top_p={top_p}",
        "kl.controller=log_pi",
        f"kl.target={TARGET}",
        "loop.eval_every=0",
        steps=STEPS,
        seed=0,
    )
    logits = recorded_logits(run)
    if len(logits.policy) < MIN_TOKENS:
        raise SystemExit(f"{len(logits.policy)} recorded tokens are fewer than {MIN_TOKENS}.")
    keep = filter_mask(logits.policy.log_softmax(-1), TokenFilters(top_p=top_p))
    _, stated = exact_kl(logits, keep)
    full_kl, full = exact_kl(logits, torch.ones_like(keep))
    restricted = relative_error(expected_gradient(logits, keep, restrict=True), stated)
    plain = relative_error(expected_gradient(logits, keep, restrict=False), full)
    last_half = slice(STEPS // 2, None)
    logged, exact = (np.array(column(run, f"kl_{k}/mean")[last_half]) for k in ("k1", "exact"))
    error = (logged - exact).std(ddof=1) / len(exact) ** 0.5
    return (
        f"{top_p:g}",
        str(len(logits.policy)),
        f"{plain:.1%}",
        f"{restricted:.2g}",
        f"{logged.mean() / exact.mean() - 1:+.1%} ± {error / exact.mean():.1%}",
        f"{exact.mean() / TARGET - 1:+.1%}",
        f"{float(full_kl.mean()):.4f}",
    )


HEAD = (
    "top_p",
    "tokens",
    "gradient error, untruncated scoring",
    "gradient error",
    "logged KL against exact",
    "exact KL against the target",
    "KL of the untruncated policies",
)


def rows(out: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for every top_p, training what is missing."""
    for top_p in TOP_P:
        yield row(out, top_p)


def main(arguments: list[str]) -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.truncated_sampling")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    Console(highlight=False, soft_wrap=True).print(markdown(HEAD, list(rows(out))), markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
