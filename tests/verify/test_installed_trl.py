"""`klinic verify` judges the KL lines of the installed TRL, executed from TRL's own source."""

import ast
import dataclasses
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import UserFunction

trl = pytest.importorskip("trl")

CORRECTION = "use_bias_correction_kl"
GRPO_NAMES = {"log_ratio", "log_importance_weights", "coef_1", "per_token_kl"}


def statements_assigning(method, names):
    """Return the compiled top-level statements of a method that assign only these names."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    inputs = {"ref_per_token_logps"}
    wanted = []
    for statement in definition.body:
        assigned = {
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if assigned & names and assigned <= names | inputs:
            wanted.append(statement)
        if "per_token_kl" in assigned:
            break
    assert wanted, "TRL's source has changed: its KL line was not found"
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
