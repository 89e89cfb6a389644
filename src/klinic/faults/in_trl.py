"""Faults of a TRL run: one defect injected into a real trainer before klinic is attached to it.

A fault changes the config, the reward, or the trainer in memory; it never writes evidence. The
mechanisms differ from those of klinic's own loop, since the code is different.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from klinic.integrations.trl.scoring import logp_of, reference_logp, trained_on
from klinic.integrations.trl.token_weights import token_weights
from klinic.model.weights import trained

SCORE, BATCH, LOSS = (
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_compute_loss",
)


def _nothing(_: Any) -> None:
    """Leave the trainer unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlFault:
    """One mechanism of one cause."""

    cause: str
    mechanism: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the config."""
    reward: Callable[..., Any] | None = None
    sabotage: Callable[[Any], None] = _nothing
    """Injects the defect into the trainer."""


def _wrap(trainer: Any, name: str, change: Callable[..., Any]) -> None:
    real = getattr(trainer, name)
    setattr(trainer, name, lambda *args, **kwargs: change(real, *args, **kwargs))


def _stale(trainer: Any) -> None:
    """Generate with the initial weights."""
    start = {name: p.detach().clone() for name, p in trained(trainer.model).items()}

    def old(real: Any, *args: Any, **kwargs: Any) -> Any:
        live = trained(trainer.model)
        now = {name: p.data for name, p in live.items()}
        for name, p in live.items():
            p.data = start[name]
        try:
            return real(*args, **kwargs)
        finally:
            for name, p in live.items():
                p.data = now[name]

    _wrap(trainer, "_generate_single_turn", old)


def _other_reference(trainer: Any) -> None:
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.mul_(1.05)


def _shifted_reference(trainer: Any) -> None:
    def shift(real: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(model, *args, **kwargs)
        theirs = model is trainer.ref_model or _without_adapters(model)
        return (torch.roll(found[0], 1, dims=1) if theirs else found[0], *found[1:])

    _wrap(trainer, SCORE, shift)


def _without_adapters(model: Any) -> bool:
    # transformers models have a method of the same name
    return any(getattr(module, "disable_adapters", None) is True for module in model.modules())


def _hole_in_mask(trainer: Any) -> None:
    def cut(real: Any, *args: Any) -> Any:
        batch = real(*args)
        mask = batch["completion_mask"].clone()
        mask[:, 1] = 0
        return {**batch, "tool_mask": mask}

    _wrap(trainer, BATCH, cut)


def _end_masked(trainer: Any) -> None:
    def cut(real: Any, *args: Any) -> Any:
        batch = real(*args)
        ends = torch.isin(batch["completion_ids"], torch.tensor(trainer.eos_token_ids))
        return {**batch, "tool_mask": batch["completion_mask"] * ~ends}

    _wrap(trainer, BATCH, cut)


def _with_beta(factor: float) -> Callable[[Any], None]:
    def sabotage(trainer: Any) -> None:
        def other(real: Any, *args: Any) -> Any:
            before, trainer.beta = trainer.beta, factor * trainer.beta
            try:
                return real(*args)
            finally:
                trainer.beta = before

        _wrap(trainer, LOSS, other)

    return sabotage


def _k1_term(trainer: Any) -> None:
    def other(real: Any, model: Any, batch: Any) -> Any:
        before, trainer.beta = trainer.beta, 0.0
        try:
            loss = real(model, batch)
        finally:
            trainer.beta = before
        logp, ref = logp_of(getattr(trainer, SCORE), model, batch), reference_logp(batch)
        weights = token_weights(trainer, batch, logp.dtype)
        assert ref is not None  # noqa: S101 - beta is above 0
        return loss + before * (weights * (logp - ref))[trained_on(batch)].sum()

    _wrap(trainer, LOSS, other)


def _nan_at_the_end(trainer: Any) -> None:
    def other(real: Any, *args: Any) -> Any:
        last = trainer.state.global_step + 1 >= trainer.args.max_steps
        return real(*args) * (torch.nan if last else 1.0)

    _wrap(trainer, LOSS, other)


def _advantages(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def sabotage(trainer: Any) -> None:
        def other(real: Any, *args: Any) -> Any:
            batch = real(*args)
            return {**batch, "advantages": change(batch["advantages"])}

        _wrap(trainer, BATCH, other)

    return sabotage


def _summed(trainer: Any) -> None:
    _wrap(trainer, LOSS, lambda real, m, batch: real(m, batch) * len(batch["completion_ids"]))


def _rounded(trainer: Any) -> None:
    def rounded(real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        coarse = (found[0].detach() * 4).round() / 4
        return (found[0] + (coarse - found[0].detach()), *found[1:])

    _wrap(trainer, SCORE, rounded)


def _dropout(trainer: Any) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def _padding_seen(trainer: Any) -> None:
    def all_seen(real: Any, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return real(model, ids, torch.ones_like(mask), *args, **kwargs)

    _wrap(trainer, SCORE, all_seen)


def _cut_prompts(trainer: Any) -> None:
    def cut(real: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return real([ids[1:] for ids in prompt_ids], *args, **kwargs)

    _wrap(trainer, "_generate_single_turn", cut)


def _frozen(trainer: Any) -> None:
    _wrap(trainer, LOSS, lambda real, *args: real(*args) * 0.0)


def _following_reference(trainer: Any) -> None:
    def follow(real: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            pairs = zip(trainer.ref_model.parameters(), trainer.model.parameters(), strict=True)
            for theirs, ours in pairs:
                theirs.copy_(ours)
        return real(*args, **kwargs)

    _wrap(trainer, BATCH, follow)


def _copies(trainer: Any) -> None:
    def copied(real: Any, *args: Any, **kwargs: Any) -> Any:
        ids, logps = real(*args, **kwargs)
        size = trainer.num_generations
        return [ids[row // size * size] for row in range(len(ids))], logps

    _wrap(trainer, "_generate_single_turn", copied)


def _random_weights(trainer: Any) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        for mine, theirs in zip(
            trainer.model.parameters(), trainer.ref_model.parameters(), strict=True
        ):
            mine.normal_(0.0, 0.02)
            theirs.copy_(mine)


def _out_of_order(completions: Any, **_: Any) -> list[float]:
    """Return the rewards in reversed order."""
    return [float(sum(map(ord, text)) % 7) for text in reversed(completions)]


def _fault(cause: str, mechanism: str, **how: Any) -> TrlFault:
    return TrlFault(cause=cause, mechanism=mechanism, **how)


TRL_FAULTS = (
    _fault("stale-sampler", "generates with the initial weights", sabotage=_stale),
    _fault(
        "temperature-on-one-side",
        "generation_kwargs set another temperature",
        settings={"generation_kwargs": {"temperature": 0.7}},
    ),
    _fault("wrong-reference", "the reference's weights are 5% larger", sabotage=_other_reference),
    _fault("misaligned-logp", "the reference's log-probs are rolled", sabotage=_shifted_reference),
    _fault("wrong-loss-mask", "the second token is masked", sabotage=_hole_in_mask),
    _fault("kl-gradient-wrong", "k1 instead of k3", sabotage=_k1_term),
    _fault("kl-not-applied", "the loss is computed at beta 0", sabotage=_with_beta(0.0)),
    _fault("kl-sign-flipped", "beta is negated in the loss", sabotage=_with_beta(-1.0)),
    _fault("nan-outside-mask", "the loss is multiplied by NaN", sabotage=_nan_at_the_end),
    _fault(
        "hidden-sampling-transform",
        "generation_kwargs set top_k",
        settings={"generation_kwargs": {"top_k": 2}},
    ),
    _fault("stop-token-fault", "end tokens are masked", sabotage=_end_masked),
    _fault(
        "advantage-explodes",
        "advantages are divided by a hundredth of the standard deviation",
        settings={"scale_rewards": "group"},
        sabotage=_advantages(lambda a: 100 * a),
    ),
    _fault("wrong-groups", "advantages of a neighbour", sabotage=_advantages(lambda a: a.roll(4))),
    _fault(
        "equal-rewards",
        "every completion gets the same reward",
        reward=lambda completions, **_: [0.5] * len(completions),
    ),
    _fault("loss-scaled-wrong", "rows are summed, not averaged", sabotage=_summed),
    _fault("imprecise-logp", "log-probs are rounded to a quarter", sabotage=_rounded),
    _fault("dropout-in-scoring", "attention dropout", sabotage=_dropout),
    _fault("layout-changes-logp", "padding is attended to", sabotage=_padding_seen),
    _fault("prompt-mismatch", "the sampler's prompts lack a token", sabotage=_cut_prompts),
    _fault("step-too-big", "a hundred times the learning rate", settings={"learning_rate": 3e-2}),
    _fault("policy-does-not-move", "the loss is multiplied by 0", sabotage=_frozen),
    _fault("broken-reward", "rewards in reversed order", reward=_out_of_order),
    _fault("moved-reference", "the reference follows the policy", sabotage=_following_reference),
    _fault("broken-sampler", "members of a group are copies", sabotage=_copies),
    _fault("context-truncated", "a limit of two tokens", settings={"max_completion_length": 2}),
    _fault("random-weights", "the policy starts from noise", sabotage=_random_weights),
)
