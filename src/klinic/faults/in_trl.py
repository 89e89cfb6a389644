"""Faults of a TRL run: one defect injected into a real trainer before klinic is attached to it.

A fault changes the config, the reward, or the trainer in memory; it never writes evidence. The
mechanisms differ from those of klinic's own loop, since the code is different.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from klinic.integrations.trl.kl_term import token_weights
from klinic.integrations.trl.scoring import reference_logp, score_completions, trained_mask
from klinic.model.weights import trainable_tensors

SCORE_METHOD, BATCH_METHOD, LOSS_METHOD = (
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_compute_loss",
)


def _leave_trainer(_: Any) -> None:
    """Leave the trainer unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlFault:
    """One mechanism of one cause."""

    cause: str
    mechanism: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the config."""
    reward: Callable[..., Any] | None = None
    sabotage: Callable[[Any], None] = _leave_trainer
    """Injects the defect into the trainer."""


def _wrap_method(trainer: Any, name: str, change: Callable[..., Any]) -> None:
    real = getattr(trainer, name)
    setattr(trainer, name, lambda *args, **kwargs: change(real, *args, **kwargs))


def _sample_from_initial_weights(trainer: Any) -> None:
    """Generate with the initial weights."""
    initial = {name: p.detach().clone() for name, p in trainable_tensors(trainer.model).items()}

    def generate_with_initial(real: Any, *args: Any, **kwargs: Any) -> Any:
        live = trainable_tensors(trainer.model)
        now = {name: p.data for name, p in live.items()}
        for name, p in live.items():
            p.data = initial[name]
        try:
            return real(*args, **kwargs)
        finally:
            for name, p in live.items():
                p.data = now[name]

    _wrap_method(trainer, "_generate_single_turn", generate_with_initial)


def _scale_reference(trainer: Any) -> None:
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.mul_(1.05)


def _shift_reference_logps(trainer: Any) -> None:
    def roll_logps(real: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        scores = real(model, *args, **kwargs)
        is_reference = model is trainer.ref_model or _has_disabled_adapters(model)
        return (torch.roll(scores[0], 1, dims=1) if is_reference else scores[0], *scores[1:])

    _wrap_method(trainer, SCORE_METHOD, roll_logps)


def _has_disabled_adapters(model: Any) -> bool:
    # transformers models have a method of the same name
    return any(getattr(module, "disable_adapters", None) is True for module in model.modules())


def _mask_second_token(trainer: Any) -> None:
    def cut_mask(real: Any, *args: Any) -> Any:
        batch = real(*args)
        mask = batch["completion_mask"].clone()
        mask[:, 1] = 0
        return {**batch, "tool_mask": mask}

    _wrap_method(trainer, BATCH_METHOD, cut_mask)


def _drop_old_logps(trainer: Any) -> None:
    """Let every update on a generation take its own log-probs as the old ones."""

    def without_old(real: Any, *args: Any) -> Any:
        return {name: x for name, x in real(*args).items() if name != "old_per_token_logps"}

    _wrap_method(trainer, BATCH_METHOD, without_old)


def _negate_advantages_in_loss(trainer: Any) -> None:
    """Maximise the loss of the policy term: the recorded advantages stay right."""

    def negated_loss(real: Any, model: Any, batch: Any) -> Any:
        return real(model, {**batch, "advantages": -batch["advantages"]})

    _wrap_method(trainer, LOSS_METHOD, negated_loss)


def _mask_end_tokens(trainer: Any) -> None:
    def cut_ends(real: Any, *args: Any) -> Any:
        batch = real(*args)
        ends = torch.isin(batch["completion_ids"], torch.tensor(trainer.eos_token_ids))
        return {**batch, "tool_mask": batch["completion_mask"] * ~ends}

    _wrap_method(trainer, BATCH_METHOD, cut_ends)


def _scale_beta(factor: float) -> Callable[[Any], None]:
    def patch_loss(trainer: Any) -> None:
        def scaled_loss(real: Any, *args: Any) -> Any:
            before, trainer.beta = trainer.beta, factor * trainer.beta
            try:
                return real(*args)
            finally:
                trainer.beta = before

        _wrap_method(trainer, LOSS_METHOD, scaled_loss)

    return patch_loss


def _use_k1_term(trainer: Any) -> None:
    def k1_loss(real: Any, model: Any, batch: Any) -> Any:
        before, trainer.beta = trainer.beta, 0.0
        try:
            loss = real(model, batch)
        finally:
            trainer.beta = before
        logp, ref = (
            score_completions(getattr(trainer, SCORE_METHOD), model, batch),
            reference_logp(batch),
        )
        weights = token_weights(trainer, batch, logp.dtype)
        assert ref is not None  # noqa: S101 - beta is above 0
        return loss + before * (weights * (logp - ref))[trained_mask(batch)].sum()

    _wrap_method(trainer, LOSS_METHOD, k1_loss)


def _nan_at_last_step(trainer: Any) -> None:
    def nan_loss(real: Any, *args: Any) -> Any:
        last = trainer.state.global_step + 1 >= trainer.args.max_steps
        return real(*args) * (torch.nan if last else 1.0)

    _wrap_method(trainer, LOSS_METHOD, nan_loss)


def _change_advantages(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def patch_batch(trainer: Any) -> None:
        def changed_batch(real: Any, *args: Any) -> Any:
            batch = real(*args)
            return {**batch, "advantages": change(batch["advantages"])}

        _wrap_method(trainer, BATCH_METHOD, changed_batch)

    return patch_batch


def _sum_rows(trainer: Any) -> None:
    _wrap_method(
        trainer, LOSS_METHOD, lambda real, m, batch: real(m, batch) * len(batch["completion_ids"])
    )


def _round_logps(trainer: Any) -> None:
    def rounded_scores(real: Any, *args: Any, **kwargs: Any) -> Any:
        scores = real(*args, **kwargs)
        coarse = (scores[0].detach() * 4).round() / 4
        return (scores[0] + (coarse - scores[0].detach()), *scores[1:])

    _wrap_method(trainer, SCORE_METHOD, rounded_scores)


def _enable_dropout(trainer: Any) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def _attend_to_padding(trainer: Any) -> None:
    def score_unmasked(
        real: Any, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return real(model, ids, torch.ones_like(mask), *args, **kwargs)

    _wrap_method(trainer, SCORE_METHOD, score_unmasked)


def _drop_first_token(trainer: Any) -> None:
    def generate_shortened(real: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return real([ids[1:] for ids in prompt_ids], *args, **kwargs)

    _wrap_method(trainer, "_generate_single_turn", generate_shortened)


def _zero_loss(trainer: Any) -> None:
    _wrap_method(trainer, LOSS_METHOD, lambda real, *args: real(*args) * 0.0)


def _sync_reference(trainer: Any) -> None:
    def copy_policy(real: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            pairs = zip(trainer.ref_model.parameters(), trainer.model.parameters(), strict=True)
            for theirs, ours in pairs:
                theirs.copy_(ours)
        return real(*args, **kwargs)

    _wrap_method(trainer, BATCH_METHOD, copy_policy)


def _copy_group_members(trainer: Any) -> None:
    def generate_copies(real: Any, *args: Any, **kwargs: Any) -> Any:
        ids, logps = real(*args, **kwargs)
        size = trainer.num_generations
        return [ids[row // size * size] for row in range(len(ids))], logps

    _wrap_method(trainer, "_generate_single_turn", generate_copies)


def _train_last_token_only(trainer: Any) -> None:
    """Write advantages per token, and those of a completion at its last token alone."""

    def placed_advantages(real: Any, *args: Any) -> Any:
        batch = real(*args)
        mask = batch["completion_mask"]
        is_last = torch.cumsum(mask, 1) == mask.sum(1, keepdim=True)
        return {**batch, "advantages": batch["advantages"][:, None] * (is_last * mask)}

    _wrap_method(trainer, BATCH_METHOD, placed_advantages)


def _add_entropy_to_loss(trainer: Any) -> None:
    """Turn the entropy bonus into a cost."""

    def costly_loss(real: Any, *args: Any) -> Any:
        coef, trainer.entropy_coef = trainer.entropy_coef, -trainer.entropy_coef
        try:
            return real(*args)
        finally:
            trainer.entropy_coef = coef

    _wrap_method(trainer, LOSS_METHOD, costly_loss)


def _keep_gradients(trainer: Any) -> None:
    trainer.model.zero_grad = lambda *_, **__: None


def _reload_start_weights(trainer: Any) -> None:
    """Copy the weights of the start over those of the policy in the middle of the run."""
    start = {name: p.detach().clone() for name, p in trainable_tensors(trainer.model).items()}

    def reload_once(real: Any, *args: Any) -> Any:
        if trainer.state.global_step == trainer.args.max_steps // 2:
            with torch.no_grad():
                for name, p in trainable_tensors(trainer.model).items():
                    p.copy_(start[name])
        return real(*args)

    _wrap_method(trainer, BATCH_METHOD, reload_once)


def _randomise_weights(trainer: Any) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        for mine, theirs in zip(
            trainer.model.parameters(), trainer.ref_model.parameters(), strict=True
        ):
            mine.normal_(0.0, 0.02)
            theirs.copy_(mine)


def _reversed_rewards(completions: Any, **_: Any) -> list[float]:
    """Return the rewards in reversed order."""
    return [float(sum(map(ord, text)) % 7) for text in reversed(completions)]


def _grade_exactly(completions: Any, answer: Any, **_: Any) -> list[float]:
    """Return 1 for a right answer, else 0: most groups have equal rewards."""
    return [float(text == want) for text, want in zip(completions, answer, strict=True)]


def _trl_fault(cause: str, mechanism: str, **options: Any) -> TrlFault:
    return TrlFault(cause=cause, mechanism=mechanism, **options)


TRL_FAULTS = (
    _trl_fault(
        "stale-sampler", "generates with the initial weights", sabotage=_sample_from_initial_weights
    ),
    _trl_fault(
        "temperature-on-one-side",
        "generation_kwargs set another temperature",
        settings={"generation_kwargs": {"temperature": 0.7}},
    ),
    _trl_fault(
        "wrong-reference", "the reference's weights are 5% larger", sabotage=_scale_reference
    ),
    _trl_fault(
        "misaligned-logp", "the reference's log-probs are rolled", sabotage=_shift_reference_logps
    ),
    _trl_fault("wrong-loss-mask", "the second token is masked", sabotage=_mask_second_token),
    _trl_fault("kl-gradient-wrong", "k1 instead of k3", sabotage=_use_k1_term),
    _trl_fault("kl-not-applied", "the loss is computed at beta 0", sabotage=_scale_beta(0.0)),
    _trl_fault("kl-sign-flipped", "beta is negated in the loss", sabotage=_scale_beta(-1.0)),
    _trl_fault("nan-outside-mask", "the loss is multiplied by NaN", sabotage=_nan_at_last_step),
    _trl_fault(
        "hidden-sampling-transform",
        "generation_kwargs set top_k",
        settings={"generation_kwargs": {"top_k": 2}},
    ),
    _trl_fault("stop-token-fault", "end tokens are masked", sabotage=_mask_end_tokens),
    _trl_fault(
        "advantage-explodes",
        "advantages are divided by a hundredth of the standard deviation",
        settings={"scale_rewards": "group"},
        sabotage=_change_advantages(lambda a: 100 * a),
    ),
    _trl_fault(
        "wrong-groups",
        "advantages of a neighbour",
        sabotage=_change_advantages(lambda a: a.roll(4)),
    ),
    _trl_fault(
        "equal-rewards",
        "every completion gets the same reward",
        reward=lambda completions, **_: [0.5] * len(completions),
    ),
    _trl_fault("loss-scaled-wrong", "rows are summed, not averaged", sabotage=_sum_rows),
    _trl_fault(
        "ratio-not-applied",
        "old log-probs are dropped",
        settings={"num_iterations": 2},
        sabotage=_drop_old_logps,
    ),
    _trl_fault(
        "policy-gradient-wrong",
        "the policy term has the wrong sign",
        sabotage=_negate_advantages_in_loss,
    ),
    _trl_fault("imprecise-logp", "log-probs are rounded to a quarter", sabotage=_round_logps),
    _trl_fault("dropout-in-scoring", "attention dropout", sabotage=_enable_dropout),
    _trl_fault("layout-changes-logp", "padding is attended to", sabotage=_attend_to_padding),
    _trl_fault("prompt-mismatch", "the sampler's prompts lack a token", sabotage=_drop_first_token),
    _trl_fault(
        "step-too-big", "a hundred times the learning rate", settings={"learning_rate": 3e-2}
    ),
    _trl_fault("policy-does-not-move", "the loss is multiplied by 0", sabotage=_zero_loss),
    _trl_fault("broken-reward", "rewards in reversed order", reward=_reversed_rewards),
    _trl_fault("moved-reference", "the reference follows the policy", sabotage=_sync_reference),
    _trl_fault("broken-sampler", "members of a group are copies", sabotage=_copy_group_members),
    _trl_fault("context-truncated", "a limit of two tokens", settings={"max_completion_length": 2}),
    _trl_fault(
        "misplaced-advantage",
        "advantages per token lie at the last token",
        sabotage=_train_last_token_only,
    ),
    _trl_fault(
        "entropy-term-wrong",
        "the entropy bonus is a cost",
        settings={"entropy_coef": 0.05},
        sabotage=_add_entropy_to_loss,
    ),
    _trl_fault(
        "truncation-not-mirrored",
        "scoring ignores the declared top-k",
        settings={"top_k": 2},
    ),
    _trl_fault(
        "gradient-not-cleared",
        "gradients are never set to zero",
        settings={"beta": 0.0, "per_device_train_batch_size": 8, "max_steps": 20},
        reward=_grade_exactly,
        sabotage=_keep_gradients,
    ),
    _trl_fault(
        "state-lost",
        "the weights of the start are loaded again",
        settings={"learning_rate": 1e-3, "max_steps": 12},
        sabotage=_reload_start_weights,
    ),
    _trl_fault("random-weights", "the policy starts from noise", sabotage=_randomise_weights),
)
