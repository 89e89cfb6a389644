"""`klinic train --dry-run`: the recipe of a run, its sizes and its memory, and nothing trained."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from klinic.capacity.memory import state_bytes
from klinic.cli.dry_run import GB, Machine, machine_of
from klinic.cli.train import FLAGS, train
from klinic.errors import ConfigError, DataError

QWEN = Path(__file__).parents[2] / "recipes" / "shapes" / "qwen2.5-7b-instruct"
RECIPE = """
model: tiny
data: {path: rows.jsonl}
rewards: ["rewards.py:one"]
sampling: {max_new_tokens: 5}
loop: {max_steps: 20, prompts_per_step: 2, group_size: 3}
learner: {micro_batch_size: 2}
kl: {coef: 0.02}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("rows.jsonl").write_text('{"prompt": "abcde"}\n{"prompt": "ab"}\n')
    Path("rewards.py").write_text("def one(prompts, completions, **_):\n    raise ValueError\n")
    return tmp_path


def invoke(*arguments):
    app = typer.Typer()
    app.command(context_settings=FLAGS)(train)
    return CliRunner().invoke(app, ["recipe.yaml", *arguments])


def dry_run(*arguments):
    done = invoke(*arguments, "--dry-run")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def answer(*arguments):
    return json.loads(dry_run(*arguments, "--json"))


@pytest.mark.torch
def test_the_recipe_is_read_as_a_run_reads_it_and_nothing_is_written(folder):
    before = sorted(folder.rglob("*"))
    text = dry_run("--kl-beta", "0.5", "learner.micro_batch_size=3")
    assert "kl_beta is written kl.coef here: 0.5" in text
    assert "kl: coef=0.5" in text
    assert "Sizes: 2 prompts x 3 completions = 6 per step, 2 micro-batches of 3" in text
    assert "Longest prompt: 5 tokens (counted)" in text
    assert "while committing" in text
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


@pytest.mark.torch
def test_json_says_the_same(folder):
    told = answer()
    assert (told["command"], told["ok"]) == ("train --dry-run", True)
    assert told["recipe"]["kl"]["coef"] == 0.02
    assert told["prompts"] == {"shortest": 2, "longest": 5, "num_held_out": 0, "assumed": None}
    phases = told["memory"]["phases"]
    assert list(phases) == ["reading", "sampling", "scoring", "updating", "committing"]
    weights = 4 * told["num_parameters"]
    for phase in phases.values():
        assert phase["weights"] == pytest.approx(weights, rel=1e-3)  # and buffers
        assert phase["reference"] == phase["weights"]
        assert phase["optimiser"] >= 2 * weights
    highest = max(phases, key=lambda name: sum(phases[name].values()))
    peak = told["memory"]["peak"]
    assert peak["phase"] == highest
    assert peak["bytes"] == sum(phases[highest].values()) + told["memory"]["overhead"]


@pytest.mark.torch
def test_a_step_is_counted_beside_its_memory(folder):
    from klinic.learner.diagnostics import diagnostic_fraction

    told = answer("learner.shards=2", "sampler.type=vllm")
    step, phases = told["step"], told["memory"]["phases"]
    # 2 prompts of up to 5 tokens, 3 completions of 5 each; 4 layers, 2 heads of 32 numbers
    assert step["num_tokens"] == 30
    assert step["cache_per_token"] == 2 * 4 * 2 * 32 * 4
    assert step["synced"] == 4 * told["num_trainable"]
    # half of the rows, to the other rank
    assert step["sent"] == round((30 * 13.125 + 6 * 5 * 4 + 6 * 128) / 2)
    flop = step["flop"]
    kl = flop["reference"] + flop["apart"]
    learning = kl + flop["scoring"] + flop["updating"]
    assert step["kl_share"] == pytest.approx(kl / learning)
    assert flop["apart"] == pytest.approx(flop["updating"] * diagnostic_fraction(20))
    # what both ways of counting know is equal, but for buffers and the step that looks closer
    held = state_bytes(
        num_parameters=told["num_parameters"],
        num_trained=told["num_trainable"],
        num_reference=told["num_parameters"],
    )
    for kind in ("weights", "reference", "optimiser"):
        assert phases["updating"][kind] == pytest.approx(held[kind], rel=1e-3), kind


@pytest.mark.torch
def test_a_rank_of_several_gpus_holds_a_shard(folder):
    whole, shard = answer(), answer("--gpus", "8", "--gpu-memory", "80")
    assert list(shard["memory"]["phases"]) == ["scoring", "updating", "committing"]
    assert shard["memory"]["overhead"] == 0
    before, after = (told["memory"]["phases"]["updating"] for told in (whole, shard))
    for kind in ("weights", "reference", "optimiser"):
        # the last shard of a tensor is padded to the size of the others
        assert before[kind] / 8 <= after[kind] < before[kind] / 7, kind
    assert after["gathered layers"] > 0
    device = shard["device"]
    assert (device["phase"], device["fit"]) == (shard["memory"]["peak"]["phase"], None)
    assert set(device["allowance"]) == {"CUDA context", "NCCL buffers", "fragmentation"}
    split = device["split"]
    assert split["samplers"] + split["learners"] == 8


@pytest.mark.torch
def test_the_cost_of_a_step_is_told(folder):
    text = dry_run("--gpus", "8", "--gpu-memory", "80")
    assert "none: it samples from the trained weights" in text
    assert "rows sent" not in text
    assert "added by the KL" in text
    assert "Best split with dedicated sampler GPUs" in text
    assert "added by the KL" not in dry_run("kl=null")


@pytest.mark.torch
@pytest.mark.slow
def test_what_a_recipe_leaves_out_costs_nothing(folder):
    tied = answer()["memory"]["phases"]["updating"]
    free = answer("kl=null")["memory"]["phases"]["updating"]
    adapted = answer("model.lora_rank=2")["memory"]["phases"]["updating"]
    assert "reference" not in free
    assert "reference" not in adapted
    assert adapted["gradients"] < free["gradients"] < tied["gradients"]
    assert adapted["optimiser"] < free["optimiser"] == tied["optimiser"]


@pytest.mark.torch
@pytest.mark.slow
def test_memory_follows_the_length(folder):
    short, long = (answer(f"sampling.max_new_tokens={n}")["memory"]["phases"] for n in (5, 25))
    # keys and values of 4 layers, 2 heads of 32 numbers in fp32, for 6 rows
    position = 2 * 4 * 2 * 32 * 4 * 6
    cache = [phases["sampling"]["cache"] for phases in (short, long)]
    assert cache[1] - cache[0] == 20 * position
    assert long["updating"]["activations"] > 2 * short["updating"]["activations"]


@pytest.mark.slow  # the meter itself is tested in test_memory.py
@pytest.mark.torch
def test_memory_follows_the_micro_batch_and_checkpointing(folder):
    some, all_, thrifty = (
        answer("model.lora_rank=2", *changes)["memory"]["phases"]["updating"]["activations"]
        for changes in (
            [],
            ["learner.micro_batch_size=6"],
            ["learner.micro_batch_size=6", "model.gradient_checkpointing=true"],
        )
    )
    assert all_ > 2 * some
    assert thrifty < all_ / 2


@pytest.mark.torch
@pytest.mark.slow
def test_the_first_steps_have_no_look_with_moments(folder):
    one, two, many = (answer(f"loop.max_steps={n}")["memory"]["phases"] for n in (1, 2, 11))
    assert "optimiser" not in one["updating"]
    assert "optimiser" in two["sampling"]
    assert sum(many["updating"].values()) > sum(two["updating"].values())


@pytest.fixture
def shallow(folder):
    """Return a folder with a config and no more: a model of 7B parameters, cut to one layer."""
    config = json.loads((QWEN / "config.json").read_text()) | {"num_hidden_layers": 1}
    Path("shallow").mkdir()
    Path("shallow/config.json").write_text(json.dumps(config))
    return "shallow"


@pytest.mark.torch
def test_a_config_alone_is_enough_and_what_is_assumed_is_said(shallow):
    how = (f"model.name={shallow}", "model.lora_rank=16")
    text = dry_run(*how, "--gpus", "2", "--gpu-memory", "80")
    ends, layer, adapter = 2 * 152064 * 3584 + 3584, 233_057_792, 1_441_792
    assert f"Parameters: {ends + layer + adapter:,}, of which {adapter:,} are trained" in text
    assert "assumed: a token for every 3 characters, since the model has no tokenizer" in text
    assert "On each of 2 GPUs, traced with tensors without data" in text
    assert "assumed and not measured: CUDA context 512 MB, NCCL buffers 512 MB" in text
    assert "It fits: " in text
    assert "gpu_memory_utilization=0." in text


@pytest.mark.torch
def test_what_does_not_fit_is_said(shallow):
    text = dry_run(f"model.name={shallow}", "--gpu-memory", "8")
    assert "It does not fit 8.0 GB" in text
    assert "It fits with these changes (peak" in text
    for change in (
        "model.gradient_checkpointing: false -> true",
        "learner.micro_batch_size: 2 -> 1",
        "model.dtype: fp32 -> bf16",
        "model.lora_rank: null -> 16",
    ):
        assert f"  {change}\n" in text
    changes = ("model.dtype=bf16", "model.lora_rank=16", "model.gradient_checkpointing=true")
    changed = dry_run(f"model.name={shallow}", "--gpu-memory", "8", *changes)
    assert "It fits: " in changed
    least = dry_run(
        f"model.name={shallow}", "--gpu-memory", "2", "learner.micro_batch_size=1", *changes
    )
    assert "No change of memory settings is left" in least


@pytest.mark.torch
def test_a_model_that_cannot_be_reached_leaves_the_memory_unknown(folder):
    text = dry_run("model.name=nobody/has-this-model")
    assert "Sizes: 2 prompts" in text
    assert "Memory: not known" in text
    assert "model.name=FOLDER" in text
    told = answer("model.name=nobody/has-this-model")
    assert (told["ok"], told["memory"]) == (True, None)


@pytest.mark.torch
@pytest.mark.slow
def test_a_model_that_needs_numbers_is_counted_by_its_weights(folder):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    experts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = {"model_type": "mixtral", "vocab_size": 99, **sizes, **experts}
    Path("experts").mkdir()
    Path("experts/config.json").write_text(json.dumps(config))
    told = answer("model.name=experts")
    assert "since MixtralForCausalLM needs values" in told["memory"]["not_counted"][0]
    held = told["memory"]["phases"]["updating"]
    assert set(held) == {"weights", "reference", "optimiser", "gradients"}
    assert held["optimiser"] == 2 * held["gradients"] == 8 * told["num_trainable"]


@pytest.mark.torch
@pytest.mark.slow
def test_rows_that_are_elsewhere_are_assumed(folder):
    told = answer("data.path=somebody/a-dataset", "model.name=tiny", "sampling.max_new_tokens=1")
    assert told["prompts"]["longest"] == 512
    assert "not on this machine" in told["prompts"]["assumed"]


@pytest.mark.torch
def test_what_a_run_refuses_is_refused(folder):
    Path("rows.jsonl").write_text('{"question": "a"}')
    with pytest.raises(DataError, match="row 1 has no `prompt`"):
        dry_run()


@pytest.mark.torch
def test_options_of_a_dry_run_belong_to_one(folder):
    done = invoke("--gpu-memory", "80")
    assert isinstance(done.exception, ConfigError)
    assert "--dry-run" in str(done.exception)


def test_gpus_need_a_size():
    assert machine_of(None, None) is None
    assert machine_of(None, 80.0) == Machine(num=1, memory=80 * GB)
    with pytest.raises(ConfigError, match="--gpu-memory 80"):
        machine_of(4, None)


@pytest.mark.torch
def test_a_cluster_is_shown_before_it_is_started(folder):
    more = ("cluster.samplers=2", "cluster.learners=3", "cluster.reward_workers=1", "threads=4")
    text = dry_run(*more)
    assert "Processes on this machine" in text
    for line in ("2 x sampler, 4 CPU each", "2 x learner, 4 CPU each", "1 x rewards, 4 CPU each"):
        assert line in text
    kinds = [place["kind"] for place in answer(*more)["processes"]]
    assert kinds == ["sampler"] * 2 + ["learner"] * 2 + ["rewards"]
    assert answer()["processes"] == []
