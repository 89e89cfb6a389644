"""What a saved model says of itself: right, the same for the same run, and nobody's to command."""

import re

import yaml
from hypothesis import given
from hypothesis import strategies as st

from klinic.recipe.recipe import Recipe
from klinic.report.model_card import CardFacts, model_card

REFERENCE = {"kind": "copy", "source": "runs/a/start", "digest": "ab12"}


def facts(recipe=None, **changed):
    given = {"model": {"name": "tiny"}, "data": {"task": "arithmetic"}, **(recipe or {})}
    made = Recipe.model_validate(given)
    known = {
        "recipe": made,
        "step": 40,
        "kl_coef": None if made.kl is None else made.kl.coef,
        "reference": REFERENCE,
        "teacher": {"kind": "copy", "source": "runs/big", "digest": "cd34"},
        "metrics": {"kl": 0.0123, "kl_k3/per_sequence": 0.0456, "eval/accuracy": 0.8},
        "causes": [],
    }
    return CardFacts(**{**known, **changed})


def rows(card):
    lines = [line for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return {
        name.strip(): value.strip()
        for _, name, value, _ in (re.split(r"(?<!\\)\|", x) for x in lines)
    }


def test_which_gradient_and_coefficient_were_used_can_be_read_off():
    kl = {"coef": 0.02, "estimator": "k3", "controller": "log_pi", "target": 0.1}
    found = rows(model_card(facts({"kl": kl}, kl_coef=0.037)))
    assert found["KL term"].startswith("`k3`, coefficient 0.037, steered by `log_pi` to 0.1. ")
    assert found["Reference"] == "copy of `runs/a/start`, digest `ab12`"
    assert found["KL to it"].startswith("0.0123 nats per token, 0.0456 per completion")
    assert found["Held out"] == "accuracy 0.800"


def test_without_a_kl_there_is_none():
    found = rows(model_card(facts(reference={"kind": None, "digest": None}, metrics={})))
    assert found["KL term"] == "none"
    assert "Reference" not in found
    assert "KL to it" not in found


def test_a_cause_is_named_and_silence_is_told_from_nobody_asked():
    assert "`stale-sampler` in step 3" in model_card(facts(causes=[(3, "stale-sampler")]))
    assert "no cause was named" in model_card(facts())
    assert "disabled (`output.doctor: none`)" in model_card(facts(causes=None))


def test_the_head_is_what_hubs_read():
    _, head, _ = model_card(facts()).split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["grpo", "klinic"]}


@given(st.text(max_size=30))
def test_no_name_leaves_its_cell(text):
    found = rows(model_card(facts(reference={**REFERENCE, "source": text})))
    assert found["Reference"].startswith("copy of `")
    assert found["Reference"].count("`") == 4
    assert len(found) == 8


def test_the_card_names_the_teacher_and_the_distance_to_it():
    taught = facts({"teacher": {"path": "runs/big", "alone": True}}, metrics={"teacher/kl": 0.25})
    found = rows(model_card(taught))
    assert "runs/big" in found["Teacher"]
    assert "instead of the rewards" in found["Teacher"]
    assert found["KL to the teacher"].startswith("0.25 nats per token")
    assert "Teacher" not in rows(model_card(facts()))
