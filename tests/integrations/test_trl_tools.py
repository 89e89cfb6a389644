"""TRL's tools and environments: every token has its source, and faults of turns are named."""

import sys
from collections import Counter

import numpy as np
import pytest

from integrations.tool_trainers import RandomSums, Sums, make_tool_trainer

pytest.importorskip("trl")

import klinic
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store
from klinic.evidence.record import EmittedBy

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:You are using 'environment_factory'"),
    pytest.mark.filterwarnings("ignore:You are using 'tools'"),
]
CODES = {EmittedBy.POLICY: "p", EmittedBy.TOOL: "t", EmittedBy.TEMPLATE: "m"}


def trained(trainer, run):
    """Train; return the diagnosis and the records."""
    with klinic.attach(trainer, run):
        trainer.train()
    records = [store.read_record(run, step) for step in store.complete_steps(run)]
    return diagnose(read_cases(run), CHECKS), records


def expected_sources(ids, tokenizer):
    """Return the sources of a row by its text: ` ;` and `=` are the template's, sums the tool's."""
    sources, is_tool, was_end = [], False, False
    for number in ids.tolist():
        text = tokenizer.decode([number])
        is_tool |= was_end
        sources.append("p" if not is_tool else "m" if text in " ;=" else "t")
        is_tool = is_tool and text != "="
        was_end = number == tokenizer.eos_token_id
    return sources


@pytest.fixture(scope="module", params=["tools", "environment"])
def healthy(request, taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    parts = {} if request.param == "tools" else {"environment_factory": Sums}
    trainer = make_tool_trainer(taught, folder / "out", max_steps=4, **parts)
    return trainer, *trained(trainer, folder / "run")


def count_turns(records, tokenizer):
    """Return the number of turns of each row, after a look at the source of every token."""
    num_turns = []
    for record in records:
        for start, end in zip(record.row_offsets[:-1], record.row_offsets[1:], strict=True):
            found = [CODES[code] for code in record.emitted_by[start:end].tolist()]
            assert found == expected_sources(record.token_ids[start:end], tokenizer)
            num_turns.append(1 + "".join(found).count("mm"))
            own = record.emitted_by[start:end] == EmittedBy.POLICY
            assert (record.loss_mask[start:end] == own).all()
    return num_turns


def test_every_token_of_every_episode_has_its_source(healthy):
    trainer, _, records = healthy
    assert sum(num > 1 for num in count_turns(records, trainer._tokenizer)) >= 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("parts", [{}, {"environment_factory": Sums}], ids=["tools", "environment"])
def test_every_token_of_200_episodes_of_several_turns_has_its_source(parts, taught, tmp_path):
    trainer = make_tool_trainer(taught, tmp_path / "out", max_steps=8, **parts)
    diagnosis, records = trained(trainer, tmp_path / "run")
    num_turns = count_turns(records, trainer._tokenizer)
    num_several = sum(num > 1 for num in num_turns)
    sys.stdout.write(
        f"{len(num_turns)} episodes, {num_several} of several turns: {Counter(num_turns)}\n"
    )
    assert num_several >= 200
    assert not diagnosis.sick, diagnosis.headline


def test_the_samplers_log_probs_of_all_turns_are_kept(healthy):
    for record in healthy[2]:
        own = record.emitted_by == EmittedBy.POLICY
        np.testing.assert_allclose(record.logp_sampler[own], record.logp[own], atol=5e-5)
        assert np.isnan(record.logp_sampler[~own]).all()
        assert record.prompt_ids_match.all()


def test_healthy_episodes_have_no_cause(healthy):
    diagnosis = healthy[1]
    assert not diagnosis.sick, diagnosis.headline
    ruled_out = {h.check.name for h in diagnosis.hypotheses if str(h.status) == "ruled out"}
    assert {"stop-token-fault", "wrong-loss-mask", "wrong-groups", "retokenised"} <= ruled_out


def change_loop(trainer, change):
    """Change the mask and the ids that TRL's loop of tool calls returns."""
    real = trainer._tool_call_loop

    def changed_loop(*args, **kwargs):
        mask, completions, ids, *others = real(*args, **kwargs)
        mask, ids = change(trainer, mask, ids)
        return mask, completions, ids, *others

    trainer._tool_call_loop = changed_loop


def train_on_tools(_, mask, ids):
    return [[1] * len(row) for row in mask], ids


def mask_turn_ends(trainer, mask, ids):
    end = trainer._tokenizer.eos_token_id
    pairs = [zip(row, tokens, strict=True) for row, tokens in zip(mask, ids, strict=True)]
    return [[int(flag and token != end) for flag, token in row] for row in pairs], ids


def render_again(trainer):
    """Write the digits of earlier turns with a leading zero, as a changed template would."""
    real = trainer._generate_single_turn

    def generate_after_new_template(prompt_ids, *args, **how):
        zero, end = trainer._tokenizer.encode("0")[0], trainer._tokenizer.eos_token_id
        for ids in prompt_ids:
            if end in ids:  # a later turn
                place = ids.index(end)
                ids[place - 1] = zero if ids[place - 1] != zero else zero + 1
        return real(prompt_ids, *args, **how)

    trainer._generate_single_turn = generate_after_new_template


FAULTS = {
    "environment tokens trained": (lambda t: change_loop(t, train_on_tools), "wrong-loss-mask"),
    "end of turn masked": (lambda t: change_loop(t, mask_turn_ends), "stop-token-fault"),
    "template rendered again": (render_again, "retokenised"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_turns_are_named(fault, taught, tmp_path):
    trainer = make_tool_trainer(taught, tmp_path / "out", max_steps=2)
    inject, cause = FAULTS[fault]
    inject(trainer)
    diagnosis, _ = trained(trainer, tmp_path / "run")
    assert diagnosis.cause == cause, diagnosis.headline


def test_groups_that_a_reset_splits_are_named(taught, tmp_path):
    settings = {"max_steps": 2, "environment_factory": RandomSums}
    trainer = make_tool_trainer(taught, tmp_path / "out", **settings)
    diagnosis, records = trained(trainer, tmp_path / "run")
    assert diagnosis.cause == "wrong-groups", diagnosis.headline
    assert "reset()" in diagnosis.causes[0].summary
    assert records[0].facts["num_split_groups"] == 8
    assert np.bincount(records[0].group).tolist() == [4] * 8
