"""An exported folder is the model that was trained, or it is not there."""

import json

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import klinic
from klinic.cli import export as command
from klinic.errors import CheckpointError, ConfigError
from klinic.model.equivalence import probe_logp
from klinic.report.model_card import CARD_NAME
from klinic.training import export as exporting
from klinic.training.export import export
from model.foreign import policy_of, write_adapter, write_base

pytestmark = pytest.mark.timeout(240)
SMALL = {
    "max_steps": 2,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "learning_rate": 1e-2,
    "output.trackers": [],
    "output.doctor": "none",
}


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that trained every weight, and one that trained an adapter."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    for name, settings in {"whole": {}, "lora": {"lora_rank": 2}}.items():
        rows = [{"prompt": f"{n}+1="} for n in range(4)]
        where = {"output.dir": str(folder / name), **settings}
        klinic.train(model="tiny", reward_funcs=digits, train_dataset=rows, **SMALL, **where)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    return folder


def logits(lm):
    with torch.no_grad():
        return lm(input_ids=torch.arange(5, 25)[None]).logits


def run(capsys, checkpoint, to, **flags):
    """Return what the command leaves with, and what it prints."""
    with pytest.raises(typer.Exit) as left:
        command.export(to=str(to), checkpoint=str(checkpoint), **flags)
    return left.value.exit_code, capsys.readouterr().out


@pytest.mark.parametrize("place", ["", "checkpoints/step=000002", "checkpoints/step=000002/model"])
def test_a_run_a_checkpoint_and_a_model_folder_are_exported(runs, tmp_path, place):
    found = export(str(runs / "whole" / place), to=str(tmp_path / "out"), merge_adapter=True)
    assert (found.ok, found.kind, found.base, found.max_difference) == (True, "model", None, 0.0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = policy_of(runs / "whole" / "checkpoints/step=000002/model")
    assert torch.equal(logits(theirs), logits(trained.lm))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+1=")
    card = (tmp_path / "out" / CARD_NAME).read_text()
    assert "| Step | 2 of 2, seed 0 |" in card
    assert "| KL term | none |" in card


def test_an_adapter_is_merged_when_asked(runs, tmp_path):
    found = export(str(runs / "lora"), to=str(tmp_path / "deep" / "out"), merge_adapter=True)
    assert (found.ok, found.kind) == (True, "merged")
    assert found.base == str(runs / "lora" / "start")
    assert 0 < found.max_difference < 1e-4
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out")
    trained = policy_of(runs / "lora" / "checkpoints/step=000002/model")
    torch.testing.assert_close(logits(theirs), logits(trained.lm), rtol=0, atol=1e-4)
    assert not (tmp_path / "deep" / "out" / "adapter_config.json").exists()


def test_an_adapter_stays_one_when_not_asked(runs, tmp_path):
    found = export(str(runs / "lora"), to=str(tmp_path / "out"), merge_adapter=False)
    assert (found.kind, found.max_difference) == ("adapter", 0.0)
    trained = policy_of(runs / "lora" / "checkpoints/step=000002/model")
    assert torch.equal(probe_logp(policy_of(tmp_path / "out").scorer), probe_logp(trained.scorer))


def test_a_folder_that_is_not_empty_is_left_alone(runs, tmp_path):
    (tmp_path / "out").mkdir()
    assert export(str(runs / "whole"), to=str(tmp_path / "out"), merge_adapter=False).ok
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export(str(runs / "whole"), to=str(tmp_path / "out"), merge_adapter=False)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        export(str(runs / "whole"), to=str(tmp_path / "file"), merge_adapter=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_without_a_checkpoint_is_said(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: tiny\ntask: arithmetic\n")
    with pytest.raises(CheckpointError, match="it has none yet"):
        export(str(tmp_path), to=str(tmp_path / "out"), merge_adapter=False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own, of the tied head
def test_a_model_that_does_not_come_back_as_it_was_fails_and_is_not_kept(tmp_path, capsys):
    tied = {"target_modules": ["embed_tokens"]}
    adapter = write_adapter(tmp_path / "a", write_base(tmp_path / "base"), **tied)
    code, printed = run(capsys, adapter, tmp_path / "out", merge=True, json=True)
    answer = json.loads(printed)
    assert (code, answer["ok"]) == (1, False)
    assert answer["max_difference"] > answer["limit"] == 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]
    assert "so it was deleted" in run(capsys, adapter, tmp_path / "out", merge=True)[1]
    assert run(capsys, adapter, tmp_path / "out")[0] == 0


def test_weights_that_are_lost_on_the_way_are_noticed(runs, tmp_path, monkeypatch):
    save = exporting.save_model

    def careless(folder, policy):
        with torch.no_grad():
            next(policy.lm.parameters()).mul_(1.01)
        save(folder, policy)

    monkeypatch.setattr(exporting, "save_model", careless)
    found = export(str(runs / "whole"), to=str(tmp_path / "out"), merge_adapter=False)
    assert not found.ok
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_it_wrote(runs, tmp_path, capsys):
    code, printed = run(capsys, runs / "lora", tmp_path / "out", merge=True)
    assert code == 0
    assert f"Wrote: {tmp_path / 'out'}, a whole model, its adapter merged into" in printed
    assert "(limit 1e-03" in printed
