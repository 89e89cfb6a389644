"""`klinic.train(...)`: objects in memory, arguments of TRL, one error for all problems, results."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import klinic
from klinic.errors import ConfigError, DataError, FunctionError
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import read_run_facts
from klinic.model.tiny import build_built_in_model

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
SMALL = {
    "max_completion_length": 3,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "report_to": "none",
    "threads": 1,
    "output.doctor": "none",
}


def right(completions, answer, **columns):
    return [float(a in text) + len(set(text)) for a, text in zip(answer, completions, strict=True)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(model="tiny", **arguments):
    usual = {"reward_funcs": right, "train_dataset": ROWS, "max_steps": 2}
    return klinic.train(model, **{**SMALL, **usual, **arguments})


def refusal(model="tiny", **arguments):
    with pytest.raises((ConfigError, DataError, FunctionError)) as error:
        train(model, **arguments)
    return str(error.value)


def losses(result):
    return [entry["loss"] for entry in result.history if "loss" in entry]


def tiny():
    return build_built_in_model("tiny", seed=3)


def test_a_model_in_memory_is_trained_as_a_copy():
    lm, tokenizer = tiny()
    before = {name: p.clone() for name, p in lm.state_dict().items()}
    one = train(lm, processing_class=tokenizer, output_dir="one")
    two = train(lm, processing_class=tokenizer, output_dir="two", kl_coef=0.1)
    assert all(torch.equal(p, before[name]) for name, p in lm.state_dict().items())
    assert losses(one)[0] == losses(two)[0]
    trained, _ = one.load_model()
    assert any(not torch.equal(p, before[name]) for name, p in trained.state_dict().items())
    assert read_run_facts(two.folder)["reference"]["source"] == str(two.folder.absolute() / "start")


def test_a_model_in_memory_starts_from_its_own_weights_also_in_bf16_and_after_a_resume():
    lm, tokenizer = tiny()
    half = build_built_in_model("tiny", seed=3)[0].to(torch.bfloat16)
    given = {"processing_class": tokenizer, "kl_coef": 0.1}
    whole = train(lm, output_dir="whole", max_steps=3, **given)
    rounded = train(half, output_dir="rounded", max_steps=1, **given)
    assert rounded.history[0]["kl"] == 0.0
    saved = load_file(rounded.folder / "start" / "model.safetensors")
    assert all(torch.equal(p.float(), saved[n]) for n, p in half.state_dict().items() if n in saved)
    assert {p.dtype for p in saved.values()} == {torch.float32}
    train(lm, output_dir="parts", max_steps=1, **given)
    path = "parts/checkpoints/step=000001"
    parts = train(lm, max_steps=3, resume_from_checkpoint=path, **given)
    assert losses(parts) == losses(whole)


def test_a_peft_model_is_trained_further_and_its_start_is_the_reference():
    from peft import LoraConfig, get_peft_model

    lm, tokenizer = tiny()
    before = {name: p.clone() for name, p in lm.state_dict().items()}
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], use_rslora=True)
    adapted = get_peft_model(lm, config)
    result = train(adapted, processing_class=tokenizer, kl_coef=0.1, output_dir="adapted")
    assert read_run_facts(result.folder)["reference"]["kind"] == "adapter_off"
    model, _ = result.load_model()
    assert model.peft_config["default"].use_rslora
    assert model.peft_config["default"].target_modules == {"q_proj"}
    base = model.unload().state_dict()
    assert all(torch.equal(p, base[name]) for name, p in before.items())


def test_a_lora_config_sets_the_adapter_and_its_dropout_stays_off(capfd):
    from peft import LoraConfig

    config = LoraConfig(r=3, lora_alpha=5, target_modules=["v_proj"], lora_dropout=0.1)
    model, _ = train(peft_config=config, max_steps=1).load_model()
    made = model.peft_config["default"]
    assert (made.r, made.lora_alpha, made.target_modules) == (3, 5, {"v_proj"})
    assert made.lora_dropout == 0
    out = capfd.readouterr().out
    assert "model.lora_rank=3 (peft_config)" in out
    assert "lora_dropout 0.1 (dropout stays off: the sampler applies none" in out


def test_layers_that_are_not_named_are_those_that_peft_chooses():
    from peft import LoraConfig

    model, _ = train(peft_config=LoraConfig(r=2), max_steps=1).load_model()
    assert model.peft_config["default"].r == 2
    lm, tokenizer = tiny()
    by_type = train(lm, processing_class=tokenizer, peft_config=LoraConfig(r=2), max_steps=1)
    assert by_type.load_model()[0].peft_config["default"].target_modules == {"q_proj", "v_proj"}


def test_what_a_lora_config_cannot_set_is_refused_with_the_way_round():
    from peft import LoraConfig

    message = refusal(peft_config=LoraConfig(use_dora=True, target_modules=".*_proj"))
    assert "peft_config sets use_dora" in message
    assert "a pattern" in message
    assert message.count("get_peft_model(model, peft_config)") == 2


def test_rewards_have_weights_and_a_name_of_a_file_works():
    from pathlib import Path

    Path("more.py").write_text("def ones(completions, **columns): return [1.0] * len(completions)")
    result = train(
        reward_funcs=[right, "more.py:ones"],
        reward_weights=[0.0, 3.0],
        max_steps=1,
    )
    assert result.metrics["reward"] == 3.0
    assert result.metrics["rewards/right/mean"] > 0
    by_config = train(args={"reward_weights": [0.25]}, max_steps=1)
    metrics = by_config.metrics
    assert metrics["reward"] == pytest.approx(metrics["rewards/right/mean"] / 4)


def test_epochs_are_steps_and_the_batch_is_that_of_one_update():
    from datasets import Dataset

    result = train(
        train_dataset=Dataset.from_list(ROWS),
        max_steps=-1,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        warmup_ratio=0.5,
        save_steps=1,
    )
    facts = (result.folder / "recipe.yaml").read_text()
    assert result.step == 4  # 16 rows, 8 x 2 / 4 = 4 prompts
    for line in ("micro_batch_size: 8", "warmup_steps: 2", "prompts_per_step: 4"):
        assert line in facts
    by_iterator = train(train_dataset=iter(ROWS), max_steps=-1, num_train_epochs=0.5)
    assert by_iterator.step == 4  # 2 prompts a step


def test_held_out_rows_in_memory_are_evaluated():
    from datasets import Dataset

    result = train(eval_dataset=Dataset.from_list(ROWS[:3]), eval_strategy="steps", eval_steps=1)
    assert [e["step"] for e in result.history if "eval/reward" in e] == [0, 1, 2]
    assert set(result.before) == set(result.after) == {"eval/reward"}


class Recorder:
    """A callback with every event that a run has."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step, state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))
        control.should_save = control.should_evaluate = state.global_step == 1
        control.should_training_stop = state.global_step == 3
        return control

    def on_log(self, args, state, control, logs, **kwargs):
        self.events.append(("log", state.global_step, "loss" in logs))

    def on_evaluate(self, args, state, control, metrics, model, **kwargs):
        assert isinstance(model, torch.nn.Module)
        self.events.append(("evaluate", state.global_step, list(metrics)))

    def on_save(self, args, state, control, processing_class, **kwargs):
        assert processing_class.eos_token
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step, len(state.log_history)))


def test_callbacks_are_called_and_may_save_evaluate_and_stop():
    recorder = Recorder()
    result = train(callbacks=[recorder], eval_dataset=ROWS[:2], max_steps=9)
    held_out = ["eval_reward"]
    assert recorder.events == [
        ("begin", 0, 9),
        *(("log", 0, False), ("evaluate", 0, held_out)),
        *(("step", 1), ("log", 1, True), ("log", 1, False), ("evaluate", 1, held_out), ("save", 1)),
        *(("step", 2), ("log", 2, True)),
        *(("step", 3), ("log", 3, True), ("save", 3)),
        ("end", 3, 5),
    ]
    assert result.step == 3
    assert (result.folder / "checkpoints" / "step=000001").is_dir()


def test_early_stopping_of_transformers_stops_a_run(monkeypatch):
    from transformers import EarlyStoppingCallback

    flat = {"reward_funcs": lambda completions, **columns: [1.0] * len(completions)}
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    result = train(callbacks=[stop], eval_dataset=ROWS[:1], eval_steps=1, max_steps=9, **flat)
    assert result.step == 2  # the first evaluation is the best, and two are not better


def test_a_callback_that_fails_or_needs_epochs_is_named():
    class Bad(Recorder):
        def on_log(self, args, state, control, logs, **kwargs):
            raise RuntimeError("no disk")

    message = refusal(callbacks=[Bad()])
    assert message.startswith("the callback Bad.on_log failed at step 1: RuntimeError: no disk.")
    assert "resume_from_checkpoint=True" in message

    class Epochs(Recorder):
        def on_epoch_end(self, args, state, control, **kwargs):
            pass

    assert "on_epoch_end: use on_step_end, with state.epoch" in refusal(callbacks=[Epochs])
    assert "must be a TrainerCallback" in refusal(callbacks=[print])


def test_one_error_lists_everything_that_cannot_be_had():
    message = refusal(
        7,
        args=5,
        callbacks=[3],
        peft_config=4,
        processing_class="tokens",
        tools=[print],
        optimizers=(1, 2),
        reward_funcs=[right, 6],
        reward_weights=[1.0],
        loss_type="sapo",
        scale_rewards="batch",
        entropy_coef=0.1,
        optim="sgd",
        save_strategy=None,
        kl_coeff=0.1,
        resume_from_checkpoint="elsewhere",
    )
    expected = [
        *("model is 7", "args is 5", "callbacks has 3", "peft_config is 4", "processing_class is"),
        *("tools is not available", "optimizers is not available", "reward_funcs has 6"),
        *("reward_weights has 1", "scale_rewards is 'batch'", "entropy_coef is 0.1"),
        *("optim is 'sgd'", "(written loss_type)", "Did you mean kl_coef?"),
        "resume_from_checkpoint is elsewhere",
    ]
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"reward_funcs": None}, "reward_funcs is missing"),
        ({"reward_funcs": "owner/reward"}, "a reward model of a hub is not loaded here"),
        ({"tokenizer": object()}, "tokenizer is not available: its name is processing_class"),
        ({"train_dataset": [{"question": "1"}] * 2}, "dataset.map(lambda row"),
        ({"gradient_accumulation_steps": 32}, "train_dataset has 16 rows"),
        ({"per_device_train_batch_size": "8"}, "it must be a number"),
        ({"save_strategy": "best"}, "save_strategy is 'best'"),
        ({"resume_from_checkpoint": True, "output_dir": "none"}, "resume_from_checkpoint=True out"),
        ({"model_init_kwargs": {"revision": "v2"}}, "Load the model yourself"),
        ({"importance_sampling_level": "sequence", "loss_type": "dapo"}, "Set loss_type='grpo'"),
        ({"load_best_model_at_end": True}, "save_total_limit"),
        ({"num_train_epoch": 3}, "num_train_epoch is not an argument. Did you mean num_train_epo"),
        ({"resume_from_chekpoint": True}, "Did you mean resume_from_checkpoint?"),
        ({"reward_func": print}, "Did you mean reward_funcs?"),
        ({"learnin_rate": 1e-3}, "Did you mean learning_rate?"),
        ({"num_generation": 4}, "num_generation is not an argument. Did you mean num_generations?"),
    ],
)
def test_a_refusal_is_in_the_words_of_the_call(arguments, part):
    message = refusal(**arguments)
    assert part in message
    assert "--resume" not in message
    assert "data.map" not in message


def test_a_model_without_a_tokenizer_is_refused_before_a_folder_is_made(tmp_path):
    assert "processing_class is missing" in refusal(tiny()[0])
    assert list(tmp_path.glob("runs/*")) == []


def test_an_older_checkpoint_is_the_start_of_another_run():
    first = train(save_steps=1)
    older = first.folder / "checkpoints" / "step=000001"
    message = refusal(resume_from_checkpoint=str(older))
    assert f"model={str(older / 'model')!r}" in message
    train(str(older / "model"), max_steps=1)


def test_a_call_that_failed_before_its_run_may_be_corrected():
    assert "there is no such folder" in refusal(model="./typo", output_dir="one")
    assert "reward_funcs is missing" not in refusal(reward_funcs="owner/reward")
    assert train(output_dir="one", max_steps=1).step == 1
    Path("own").mkdir()
    Path("own", "recipe.yaml").write_text("mine")
    assert "which is not empty" in refusal(output_dir="own")
    assert Path("own", "recipe.yaml").read_text() == "mine"


def test_a_run_in_the_way_is_renamed_on_request():
    train(output_dir="out", max_steps=1)
    assert "resume_from_checkpoint=True" in refusal(output_dir="out", max_steps=1)
    train(output_dir="out", max_steps=1, args={"overwrite_output_dir": True})
    train(output_dir="out", max_steps=1, overwrite_output_dir=True)


def test_renamed_arguments_and_those_without_effect_are_one_line_each(capfd):
    train(beta=0.01, logging_steps=5, run_name="a", push_to_hub=True, max_steps=1)
    lines = capfd.readouterr().out.splitlines()
    (settings,) = [line for line in lines if line.startswith("Settings: ")]
    (unused,) = [line for line in lines if line.startswith("Without effect: ")]
    for part in ("kl.coef=0.01 (beta)", "loop.max_steps=1 (max_steps)", "loop.prompts_per_step=2"):
        assert part in settings
    for part in ("logging_steps (every step is logged)", "run_name (a run has", "push_to_hub ("):
        assert part in unused
    assert not any(" is written " in line for line in lines)


def test_sections_may_be_objects():
    recovery = klinic.Recovery(kl_limit=5.0)
    result = train(kl=klinic.KL(coef=0.02, estimator="k3"), recovery=recovery, max_steps=1)
    recipe = (result.folder / "recipe.yaml").read_text()
    assert "coef: 0.02\n  estimator: k3" in recipe
    assert "kl_limit: 5.0" in recipe


def test_the_result_has_metrics_history_and_model():
    result = train(eval_dataset=ROWS[:2])
    assert isinstance(result, klinic.Result)
    assert [entry["step"] for entry in result.history] == [0, 1, 2, 2]
    assert result.metrics["eval/reward"] == result.after["eval/reward"]
    assert "step" not in result.metrics
    frame = result.to_pandas()
    assert list(frame.index) == [0, 1, 2]
    assert frame["reward"].dropna().tolist() == [e["reward"] for e in result.history[1:3]]
    assert np.isfinite(frame.loc[2, ["reward", "eval/reward"]].to_numpy(float)).all()
    assert repr(result).startswith("Result(step=2, folder=")
    assert "eval/reward" in repr(result)
    html = result._repr_html_()
    assert f"<td>{result.history[1]['reward']:.4g}</td>" in html
    model, tokenizer = result.load_model()
    ids = torch.tensor([tokenizer("1+1=")["input_ids"]])
    assert model(input_ids=ids).logits.shape[-1] == model.config.vocab_size


def test_a_folder_with_markup_in_its_name_is_escaped_in_a_notebook():
    result = train(output_dir="<b>run</b>", max_steps=1)
    assert "<b>run" not in result._repr_html_()
    assert "&lt;b&gt;run" in result._repr_html_()


def test_a_notebook_shows_one_display_that_is_updated(monkeypatch):
    pages = []
    handle = types.SimpleNamespace(update=pages.append)
    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda page, display_id: pages.append(page) or handle
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("klinic.training.api.runs_in_notebook", lambda: True)

    def markup(completions, **columns):
        return [float(len(set(text))) for text in completions]

    result = train(reward_funcs=markup, eval_dataset=ROWS[:1], log_completions=True)
    assert '<progress value="0" max="2">' in pages[0]
    assert '<progress value="2" max="2">' in pages[-1]
    assert f"<td>{result.history[-2]['reward']:.4f}</td>" in pages[-1]
    assert "Step 2 | Held out | reward: " in pages[-1]
    assert "Completions of step 2" in pages[-1]


def test_completions_cannot_write_markup_into_a_notebook():
    from klinic.trackers.notebook import html_table

    assert html_table(["a"], [["<script>x</script>"]]) == (
        "<table><tr><th>a</th></tr><tr><td>&lt;script&gt;x&lt;/script&gt;</td></tr></table>"
    )


def test_every_argument_of_a_config_is_read():
    trl = pytest.importorskip("trl")
    from dataclasses import fields

    from klinic.recipe.aliases import ALIASES
    from klinic.recipe.trl_arguments import known_names

    names = {field.name for field in fields(trl.GRPOConfig)}
    assert names - known_names() - ALIASES.keys() == {"resume_from_checkpoint"}


def test_no_step_is_lost_from_the_journal():
    result = train(max_steps=1)
    assert list(Journal(result.folder / "metrics.jsonl").entries()) == result.history
