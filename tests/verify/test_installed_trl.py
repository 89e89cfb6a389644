"""`klinic verify` judges the KL lines of the installed TRL, executed from TRL's own source."""

import ast
import dataclasses
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from klinic.verify.advice import judge
from klinic.verify.expectation import EnumeratedPairs
from klinic.verify.function import measure
from klinic.verify.loading import UserFunction
from klinic.verify.targets import target_gradients
from klinic.verify.toy_policies import COMPLETION_LENGTH, PAIR_SIZE, on_policy_worlds

trl = pytest.importorskip("trl")

CORRECTION = "use_bias_correction_kl"
GRPO_NAMES = {"log_ratio", "log_importance_weights", "coef_1", "per_token_kl"}


def statements_assigning(method, names, *, first=None, last="per_token_kl"):
    """Return the compiled top-level statements of a method that assign only these names.

    From the statement that assigns `first` (default: from the start) to that which assigns `last`.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    inputs = {"ref_per_token_logps"}
    wanted, started = [], first is None
    for statement in definition.body:
        assigned = {
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        started = started or first in assigned
        if started and assigned & names and assigned <= names | inputs:
            wanted.append(statement)
        if started and last in assigned:
            break
    assert wanted, "TRL's source has changed: its lines were not found"
    return compile(ast.Module(body=wanted, type_ignores=[]), "trl", "exec")


def grpo_term(*, corrected):
    lines = statements_assigning(trl.GRPOTrainer._compute_loss, GRPO_NAMES)
    trainer = SimpleNamespace(
        beta=1.0,
        importance_sampling_level="token",
        args=SimpleNamespace(**{CORRECTION: corrected}),
    )

    def term(logp, logp_ref, logp_old):
        scope = {
            "torch": torch,
            "self": trainer,
            "inputs": {"ref_per_token_logps": logp_ref},
            "per_token_logps": logp,
            "old_per_token_logps": logp_old,
        }
        exec(lines, scope)  # noqa: S102 - the installed package's own lines
        return scope["per_token_kl"]

    roles = {name: name for name in ("logp", "logp_ref", "logp_old")}
    measured = measure(UserFunction(name="TRL", call=term, roles=roles))
    return measured, judge(measured)


def default_of(config, name):
    return next(f.default for f in dataclasses.fields(config) if f.name == name)


def test_the_default_term_of_grpo_has_the_gradient_of_the_kl():
    assert default_of(trl.GRPOConfig, CORRECTION) is True
    assert default_of(trl.GRPOConfig, "importance_sampling_level") == "token"
    measured, judgement = grpo_term(corrected=True)
    assert judgement.value == "KL(policy || reference)"
    assert measured.gradient.gradient == "reverse_token"
    assert measured.off_policy.gradient == "reverse_token_off_policy"


def test_without_the_correction_grpo_descends_the_other_direction_token_by_token():
    measured, judgement = grpo_term(corrected=False)
    assert judgement.verdict == "conditional"
    assert measured.gradient.gradient == "forward_token"
    assert measured.off_policy.gradient != "reverse_token_off_policy"


RLOO_REWARD_NAMES = {
    *("per_token_kl", "kl", "rewards", "grouped_rewards", "scorable_counts", "grouped_sum"),
    *("baselines", "advantages"),
}
RLOO_LOSS_NAMES = {
    *("logps", "old_logps", "log_ratio", "advantages", "coef_1", "coef_2"),
    *("per_sequence_loss1", "per_sequence_loss2", "per_sequence_loss"),
}


def rloo_loss_per_row(logp, logp_ref, mask, reward, beta):
    """Run RLOO's lines on padded rows, two generations a prompt, at the first update."""
    method = trl.RLOOTrainer._generate_and_score_completions
    score = statements_assigning(
        method, RLOO_REWARD_NAMES, first="per_token_kl", last="is_std_zero"
    )
    loss = statements_assigning(
        trl.RLOOTrainer._compute_loss, RLOO_LOSS_NAMES, first="logps", last="per_sequence_loss"
    )
    trainer = SimpleNamespace(
        beta=beta,
        normalize_advantages=default_of(trl.RLOOConfig, "normalize_advantages"),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    scope = {
        "torch": torch,
        "gather": lambda x: x,
        "self": trainer,
        "num_generations": PAIR_SIZE,
        "rewards": reward,
        "old_per_token_logps": logp.detach(),
        "ref_per_token_logps": logp_ref,
        "per_token_logps": logp,
        "completion_mask": mask,
    }
    exec(score, scope)  # noqa: S102 - the installed package's own lines
    scope["inputs"] = {
        "old_logps": (logp * mask).sum(1).detach(),
        "advantages": scope["advantages"],
    }
    exec(loss, scope)  # noqa: S102
    return scope["per_sequence_loss"]


@pytest.mark.parametrize("name", ["far", "shared", "eos", "shared eos"])
def test_k1_in_the_reward_of_rloo_has_the_gradient_of_the_kl_between_completions(name):
    """Every pair of completions, padded as TRL pads them, with beta 1 and no reward."""
    assert default_of(trl.RLOOConfig, "normalize_advantages") is False
    (world,) = [world for world in on_policy_worlds() if world.name == name]
    pairs = EnumeratedPairs.from_world(world)
    rows = world.completion_pairs
    lengths = rows.row_offsets.diff()
    mask = torch.arange(COMPLETION_LENGTH) < lengths[:, None]

    def padded(values):
        grid = values.new_zeros(mask.shape)
        return grid.masked_scatter(mask, values)

    loss = rloo_loss_per_row(
        padded(pairs.inputs.logp),
        padded(pairs.inputs.logp_ref),
        mask.double(),
        torch.zeros(rows.num_rows, dtype=torch.float64),
        1.0,
    )
    probability = world.pair_probability.repeat_interleave(PAIR_SIZE) / PAIR_SIZE
    # one number per token, so that the sum over tokens is the expected loss
    first = torch.zeros_like(pairs.inputs.logp).index_add(
        0, rows.row_offsets[:-1], loss * probability
    )
    gradient = pairs.total_gradient(first)
    target = target_gradients(world)["reverse_sequence"]
    assert float((gradient - target).norm() / target.norm()) < 1e-12
