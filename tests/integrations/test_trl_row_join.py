"""Rows, emitters and samplers of a TRL run are found by content, whatever the user's code moves."""

import copy

import numpy as np
import pytest
import torch

from integrations.trainers import make_trainer, save_start

pytest.importorskip("trl")

import klinic
from klinic.checks import (
    Case,
    Verdict,
    prompt_mismatch,
    stale_sampler,
    wrong_groups,
    wrong_loss_mask,
)
from klinic.evidence import store
from klinic.evidence.record import EmittedBy
from klinic.evidence.run_facts import read_run_facts

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
ONE_BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("trl") / "start")


@pytest.fixture
def trainer(start, tmp_path):
    return make_trainer(start, tmp_path / "out", max_steps=1, **ONE_BATCH)


def last_case(trainer, run):
    """Train, and return the case of the last step."""
    with klinic.attach(trainer, run, doctor="none"):
        trainer.train()
    record = store.read_record(run, store.complete_steps(run)[-1])
    return Case(record=record, run=read_run_facts(run))


def sort_rows(trainer, keys):
    """Sort these columns of every batch by length, longest first."""
    real = trainer._generate_and_score_completions

    def sorted_batch(inputs):
        batch = real(inputs)
        order = batch["completion_ids"].sum(1).argsort()
        return {name: x[order] if name in keys else x for name, x in batch.items()}

    trainer._generate_and_score_completions = sorted_batch


IDS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "ref_per_token_logps"}


def test_rows_that_are_sorted_without_their_advantages_are_found(trainer, tmp_path):
    sort_rows(trainer, IDS)
    case = last_case(trainer, tmp_path / "run")
    assert case.record.facts["num_moved_rows"] > 4
    # the sampler's log-probs are those of the row's own tokens
    np.testing.assert_allclose(case.record.logp_sampler, case.record.logp, atol=2e-5)
    assert case.record.prompt_ids_match.all()
    found = wrong_groups.CHECK(case)
    assert found.verdict is Verdict.FAIL
    assert "moved" in found.summary


def test_rows_that_are_sorted_with_their_advantages_pass(trainer, tmp_path):
    sort_rows(trainer, IDS | {"advantages"})
    case = last_case(trainer, tmp_path / "run")
    assert case.record.facts["num_moved_rows"] > 4
    assert wrong_groups.CHECK(case).verdict is Verdict.PASS


def test_rows_that_stay_are_not_moved(trainer, tmp_path):
    case = last_case(trainer, tmp_path / "run")
    assert case.record.facts["num_moved_rows"] == 0
    assert case.record.facts["num_changed_rows"] == 0
    assert case.record.facts["weights_loaded"] is None


def test_ids_that_are_changed_after_sampling_are_not_the_policys(trainer, tmp_path):
    real = trainer._generate_and_score_completions

    def changed_batch(inputs):
        batch = real(inputs)
        ids = batch["completion_ids"].clone()
        ids[0, -1] = (ids[0, -1] + 1) % 10 + 5
        mask = torch.ones_like(batch["completion_mask"])
        return {**batch, "completion_ids": ids, "completion_mask": mask}

    trainer._generate_and_score_completions = changed_batch
    case = last_case(trainer, tmp_path / "run")
    assert case.record.facts["num_changed_rows"] == 1
    assert (case.record.emitted_by == EmittedBy.TOOL).sum() == 1
    assert wrong_loss_mask.CHECK(case).verdict is Verdict.FAIL


def rollout(feedback):
    def roll_out(prompts, trainer):
        tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(text=prompts)["input_ids"]
        width = max(map(len, prompt_ids))
        pads = [width - len(ids) for ids in prompt_ids]
        ids = torch.tensor(
            [[tokenizer.pad_token_id] * n + p for n, p in zip(pads, prompt_ids, strict=True)]
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
        with torch.no_grad():
            made = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config
            )
        completions = []
        for row in made[:, width:].tolist():
            ends = [i for i, t in enumerate(row) if t in trainer.eos_token_ids]
            completions.append(row[: ends[0] + 1 if ends else len(row)] + feedback)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    return roll_out


@pytest.mark.parametrize("feedback", [[], [5, 6]])
def test_tokens_of_an_environment_are_not_the_policys(start, tmp_path, feedback):
    settings = {**ONE_BATCH, "rollout_func": rollout(feedback)}
    case = last_case(make_trainer(start, tmp_path / "out", max_steps=1, **settings), tmp_path / "r")
    foreign = case.record.emitted_by == EmittedBy.TOOL
    assert foreign.sum() == len(feedback) * case.record.num_rows
    expected = Verdict.FAIL if feedback else Verdict.PASS
    assert wrong_loss_mask.CHECK(case).verdict is expected
    assert np.isnan(case.record.logp_sampler[foreign]).all()
    own = ~foreign
    np.testing.assert_allclose(case.record.logp_sampler[own], case.record.logp[own], atol=2e-5)


@pytest.mark.parametrize("sync_every", [1, 10])
def test_a_copy_of_the_model_that_generates_is_compared_with_the_policy(
    start, tmp_path, sync_every
):
    trainer = make_trainer(start, tmp_path / "out", max_steps=2, **ONE_BATCH)
    real, copies = trainer._generate_single_turn, []

    def generate_with_copy(*args, **kwargs):
        live = trainer.model_wrapped
        if trainer.state.global_step % sync_every == 0:
            copies.append(copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model)))
        trainer.model_wrapped = copies[-1]
        try:
            return real(*args, **kwargs)
        finally:
            trainer.model_wrapped = live

    trainer._generate_single_turn = generate_with_copy
    case = last_case(trainer, tmp_path / "run")
    is_equal = case.record.facts["weights_loaded"] == case.record.facts["weights_published"]
    assert is_equal == (sync_every == 1)
    found = stale_sampler.CHECK(case)
    assert (found.verdict is Verdict.FAIL) == (sync_every == 10)
    assert case.record.logp_sampler is not None


def test_padding_that_the_sampler_attends_to_is_another_prompt(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", max_steps=1, **ONE_BATCH)

    def generate_unmasked(prompt_ids, *_):
        width = 1 + max(map(len, prompt_ids))
        pad = trainer._tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompt_ids])
        with torch.no_grad():
            made = trainer.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=trainer.generation_config,
            )
        rows = made[:, width:].tolist()
        ends = [[i for i, t in enumerate(row) if t in trainer.eos_token_ids] for row in rows]
        return [row[: e[0] + 1] if e else row for row, e in zip(rows, ends, strict=True)], None

    trainer._generate_single_turn = generate_unmasked
    case = last_case(trainer, tmp_path / "run")
    assert not case.record.prompt_ids_match.any()
    assert prompt_mismatch.CHECK(case).verdict is Verdict.FAIL
