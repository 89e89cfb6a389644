# ruff: noqa: T201 - a script that talks
"""GRPO with a KL penalty in one file: a model of characters learns to copy four digits in a minute.
No download, no GPU. The formulas are those of `klinic.maths`, which `klinic verify` proves.

    python examples/starter.py                                   # use_kl_penalty=False
    python examples/starter.py --use-kl-penalty --kl-coef 0.01   # tied to a frozen copy
"""

import argparse
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from klinic.maths import advantage, kl, kl_inputs, kl_terms, masked, surrogate
from klinic.model.tiny import tiny_model, tiny_tokenizer
from klinic.tasks.arithmetic.task import TASK
from klinic.trackers.console import step_parts

TOKENIZER = tiny_tokenizer()
ROWS, HELD_OUT = TASK.train_rows("copying"), TASK.eval_rows("copying", 128)
NUM_NEW = 5  # "copy 4821=" asks for four digits and the end; all prompts are equally long
NUM_PROMPTS, GROUP_SIZE, NUM_MICROBATCHES = 16, 8, 2
LEARNING_RATE, MAX_GRAD_NORM = 2e-4, 1.0
WARM_RATE, WARM_ROWS, WARM_STEPS, WARM_LOSS = 3e-3, 64, 200, 0.4  # then some answers are right


class Batch(NamedTuple):
    """The completions of a step: prompts and answers, and a `mask` that is True up to the end."""

    ids: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def compute_kl_divergence(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return k3 of each token, [batch, seq]: its mean over samples is KL(policy || reference)."""
    # never differentiated: on policy, its token-level gradient is that of KL(reference || policy)
    return kl.k3(logp_p=policy_log_probs.detach(), logp_q=ref_log_probs.detach())


def compute_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Return PPO's clipped loss + kl_coef * KL(policy || reference), and numbers to read."""
    tokens = {"logp": log_probs, "logp_old": old_log_probs, "loss_mask": mask}
    flat: dict[str, Any] = {name: x.flatten() for name, x in tokens.items()}  # rows end to end
    flat["row_offsets"] = torch.arange(len(mask) + 1) * mask.shape[1]
    weights = masked.token_mean(flat["loss_mask"], dtype=log_probs.dtype)
    terms = surrogate.clipped_surrogate(surrogate.PolicyInputs(advantage=advantages, **flat))
    loss = masked.weighted_sum(terms, weights)
    if ref_log_probs is None or kl_coef == 0:
        return loss, {"loss": loss.item(), "kl_penalty_mean": 0.0}
    ref = {"logp_ref": ref_log_probs.flatten(), "logp_sampler": flat["logp_old"]}
    inputs = kl_inputs.KLInputs(group=torch.arange(len(mask)), **ref, **flat)
    pull = masked.weighted_sum(kl_terms.unbiased(inputs.zero_outside_mask()), weights)
    mean = masked.weighted_sum(compute_kl_divergence(flat["logp"], ref["logp_ref"]), weights)
    loss = loss + kl_coef * (mean + pull - pull.detach())  # reads as k3, pulls as `unbiased`
    return loss, {"loss": loss.item(), "kl": mean.item(), "kl_penalty_mean": kl_coef * mean.item()}


def completion_log_probs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-prob of each token of the completions: logits at t are for token t + 1."""
    logits = model(ids[:, :-1]).logits[:, -NUM_NEW:]  # all at once; `klinic train` takes chunks
    return torch.log_softmax(logits, -1).gather(-1, ids[:, -NUM_NEW:, None])[..., 0]


def grpo_microbatch_step(
    model: Any, ref_model: Any, batch: Batch, kl_coef: float, num_microbatches: int = 1
) -> dict[str, float]:
    """Add the gradient of a step to that of the weights, in parts that do not change the sum."""
    total: dict[str, float] = {}
    for part in map(Batch._make, zip(*(x.chunk(num_microbatches) for x in batch), strict=True)):
        with torch.no_grad():
            ref = completion_log_probs(ref_model, part.ids) if ref_model and kl_coef > 0 else None
        loss, meta = compute_loss(completion_log_probs(model, part.ids), *part[1:], ref, kl_coef)
        share = (part.mask.sum() / batch.mask.sum()).item()  # of the tokens of the whole step
        (share * loss).backward()
        total = {name: total.get(name, 0.0) + share * meta[name] for name in meta}
    return total


@torch.no_grad()
def sample(model: Any, rows: list[dict[str, str]], group_size: int) -> tuple[Batch, float]:
    """Return completions of each prompt with their advantages, and the mean reward."""
    rows = [row for row in rows for _ in range(group_size)]
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    ids = torch.tensor(TOKENIZER(prompts)["input_ids"])
    for _ in range(NUM_NEW):
        ids = torch.cat([ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)], 1)
    said = ids[:, -NUM_NEW:]
    mask = torch.nn.functional.pad(said == TOKENIZER.eos_token_id, (1, -1)).cumsum(1) == 0
    texts = TOKENIZER.batch_decode(said * mask, skip_special_tokens=True)  # token 0 is padding
    reward = torch.tensor(TASK.rewards["binary"](prompts, texts, answers))
    advantages = advantage.group_std(reward, torch.arange(len(rows)) // group_size)
    return Batch(ids, completion_log_probs(model, ids), advantages, mask), reward.mean().item()


def log_train(step: int, metrics: dict[str, float], writer: Any) -> None:
    """Print the line of a step, and write its numbers for TensorBoard."""
    print(" | ".join(step_parts(step, metrics)), flush=True)
    for name, number in metrics.items():
        writer.add_scalar(f"train/{name}", number, step)


def train(model: Any, steps: int, writer: Any, ref_model: Any = None, kl_coef: float = 0.0) -> None:
    """Sample, score, update: once a step, so that every token comes from the policy it trains."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(1, steps + 1):
        rows = [ROWS[i] for i in torch.randint(len(ROWS), (NUM_PROMPTS,))]
        batch, reward = sample(model, rows, GROUP_SIZE)
        meta = grpo_microbatch_step(model, ref_model, batch, kl_coef, NUM_MICROBATCHES)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item()
        optimizer.step()
        optimizer.zero_grad()
        meta |= {"grad_norm": norm, "reward": reward, "kl_penalty": meta.pop("kl_penalty_mean")}
        log_train(step, meta, writer)


def warm_start(model: Any) -> None:
    """Imitate answers until some completions are right: before, there is nothing to reward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        rows = [ROWS[i] for i in torch.randint(len(ROWS), (WARM_ROWS,))]
        texts = [row["prompt"] + row["answer"] + TOKENIZER.eos_token for row in rows]
        loss = -completion_log_probs(model, torch.tensor(TOKENIZER(texts)["input_ids"])).mean()
        if loss < WARM_LOSS:
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def quick_tests() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what must hold: its name, what is found, what is right."""
    logits = torch.tensor([0.7, 0.2, 0.1]).log().requires_grad_()
    logp, logp_ref = logits.log_softmax(-1), torch.tensor([0.8, 0.1, 0.1]).log()
    drawn = torch.tensor([[0] * 7 + [1] * 2 + [2]])  # as often as the policy says: means are exact
    now, ref, gain, every = logp[drawn], logp_ref[drawn], torch.ones(1), drawn < 3

    def pull(*given: Any, at: Tensor = logits) -> Tensor:
        return torch.autograd.grad(compute_loss(*given)[0], at, retain_graph=True)[0]

    found, exact = compute_kl_divergence(now, ref), kl.exact(logp_p=logp, logp_q=logp_ref)
    yield "KL is 0 at equal log-probs", compute_kl_divergence(ref, ref), torch.zeros(1, 10)
    yield "KL is never negative", found, found.clamp(min=0)
    yield "0.7 ln(0.7/0.8) + 0.2 ln(0.2/0.1) = 0.04516", found.mean(), torch.tensor(0.0451574)
    given = (now, now.detach(), gain, every)
    yield "coefficient 0 is no reference", pull(*given, ref, 0.0), pull(*given)
    right = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    yield "KL pulls to the reference", pull(now, now.detach(), 0 * gain, every, ref, 1.0), right
    seen = drawn < 2
    outside = pull(now, now.detach(), gain, seen, ref.where(seen, torch.nan), 1.0, at=now)[~seen]
    yield "masked tokens pull at nothing", outside, torch.zeros(1)
    ids, mask = torch.randint(3, 50, (8, 9)), torch.arange(NUM_NEW) <= torch.arange(8)[:, None] % 5
    batch = Batch(ids, torch.full((8, NUM_NEW), -4.0), torch.linspace(-1, 1, 8), mask)
    models = [tiny_model(TOKENIZER, seed) for seed in (1, 1, 2)]
    for model, num in zip(models[:2], (1, 4), strict=True):
        grpo_microbatch_step(model, models[2], batch, 0.1, num)
    one, four = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in models[:2])
    yield "1 and 4 micro-batches have the same gradient", one, four


def main() -> None:
    """Check the functions above, make a model that is sometimes right, and train it."""
    parser = argparse.ArgumentParser(description="GRPO with a KL penalty on a tiny model.")
    parser.add_argument("--use-kl-penalty", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--kl-coef", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/starter", help="folder for TensorBoard")
    args = parser.parse_args()
    if not args.kl_coef >= 0:
        parser.error(f"--kl-coef is {args.kl_coef}: it would push away. Use 0.001 to 0.1.")
    print("=== Running Quick Tests ===")
    for name, found, right in quick_tests():
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
        print(f"passed: {name}")
    print("=== All Tests Passed! ===")
    torch.manual_seed(args.seed)
    model = tiny_model(TOKENIZER, args.seed)
    warm_start(model)
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    print(f"Reward at the start: {sample(model, HELD_OUT, 1)[1]:.4f}", flush=True)
    with SummaryWriter(args.out) as writer:
        train(model, args.steps, writer, frozen if args.use_kl_penalty else None, args.kl_coef)
    print(f"Reward at the end: {sample(model, HELD_OUT, 1)[1]:.4f}")


if __name__ == "__main__":
    main()
