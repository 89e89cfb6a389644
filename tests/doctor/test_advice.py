"""Fixes in the settings of other trainers."""

import re

import pytest

from evidence.records import full_record
from klinic.checks import CHECKS
from klinic.checks.base import Case, Check, Stage, failed_finding
from klinic.doctor.advice import STEPS, find_steps
from klinic.doctor.diagnosis import diagnose

NAMES = {check.name for check in CHECKS}


@pytest.mark.parametrize("trainer", STEPS)
def test_every_cause_has_steps_and_no_step_belongs_to_an_unknown_cause(trainer):
    assert STEPS[trainer].keys() == NAMES


def diagnose_as(trainer, **facts):
    check = Check(
        name="stale-sampler",
        description="a fault",
        stage=Stage.SAMPLER,
        needs=(),
        fix="Do it.",
        judge=lambda _: failed_finding("s"),
        change={"sampling.top_p": 1.0},
    )
    (cause,) = diagnose(
        [Case(record=full_record(), run={"trainer": trainer, **facts})], [check]
    ).causes
    return cause


def test_a_run_of_trl_gets_steps_for_trl_and_no_keys_of_klinic():
    cause = diagnose_as("trl")
    assert cause.steps == find_steps("stale-sampler", "trl")
    assert (cause.change, cause.first_fix) == ({}, cause.steps[0])


@pytest.mark.parametrize(
    ("sampler", "first"),
    [
        ({"kind": "vllm", "shares_weights": False}, "With an own vLLM engine, send the weights"),
        ({"kind": "transformers", "shares_weights": True}, "Generate with `trainer.model`"),
        ("vllm", "Generate with `trainer.model`"),
    ],
)
def test_steps_for_engines_come_first_where_an_engine_samples(sampler, first):
    cause = diagnose_as("trl", sampler=sampler)
    assert cause.first_fix.startswith(first)
    assert sorted(cause.steps) == sorted(find_steps("stale-sampler", "trl"))


@pytest.mark.parametrize("trainer", ["klinic", None, ["trl"], "other"])
def test_any_other_run_gets_the_fix_with_recipe_keys(trainer):
    cause = diagnose_as(trainer)
    assert (cause.steps, cause.first_fix) == ((), "Do it.")
    assert cause.change == {"sampling.top_p": 1.0}


KEYS = {
    "verl": ("actor_rollout_ref.", "algorithm.", "data.", "reward.", "trainer."),
    "nemo-rl": ("policy.", "grpo.", "loss_fn.", "data.", "env", "checkpointing."),
}


@pytest.mark.parametrize("trainer", KEYS)
def test_keys_are_written_whole_from_a_section_of_that_trainer(trainer):
    steps = [step for steps in STEPS[trainer].values() for step in steps]
    assigned = [key for step in steps for key in re.findall(r"`([a-z_.0-9]+)=", step)]
    assert len(assigned) > 20
    shortened = [key for key in assigned if not key.startswith(KEYS[trainer])]
    assert set(shortened) <= {"freeze_moe_router"}  # beside its neighbour
