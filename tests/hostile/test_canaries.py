"""A run folder from a stranger runs nothing: each kind of code, by each command that reads a run.

Every canary writes a file when it runs. The last tests let the user allow it, and see it written.
"""

import json
import socket
import threading
from contextlib import closing

import pytest

pytest.importorskip("torch")

import received as kinds
import torch
from received import Received

from klinic.recipe.yaml_text import dump_yaml, parse_yaml

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def words_of(name, run, tmp_path):
    """Return a command on a run folder."""
    return {
        "eval": ["eval", run, "--num", "1"],
        "eval of a task": ["eval", run, "--num", "1", "--task", "arithmetic"],
        "export": ["export", run, "--to", tmp_path / "exported"],
        "check": ["check", run / "recipe.yaml"],
        "prove": ["diagnose", run, "--prove"],
        "diagnose": ["diagnose", run],
        "report": ["report", run],
        "terminal report": ["report", run, "--terminal"],
        "watch": ["watch", run],
        "ablate": ["ablate", "--plot", run, "--out", tmp_path / "ablation"],
    }[name]


def arm(kind, trained, tmp_path):
    received = Received(trained, tmp_path)
    kind(received)
    return received


def named(value):
    return getattr(value, "__name__", None)


# Loading and replaying commands with every kind of code that they could load.
LOADING = [
    (name, kind)
    for name, some in {
        "eval": kinds.KINDS,
        "eval of a task": (*kinds.MODEL_CODE, kinds.pickle_alone, kinds.template),
        "export": (*kinds.MODEL_CODE, kinds.pickle_alone, kinds.pickle_beside, kinds.reward),
        "prove": kinds.KINDS,
        "check": (*kinds.FUNCTIONS, *kinds.MODEL_CODE),
        "ablate": (kinds.reward, kinds.own_reward, kinds.model_code),
    }.items()
    for kind in some
]
IN_CI = {
    ("eval", "reward"),
    ("eval", "held_out_reward"),
    ("eval", "data_map"),
    ("eval", "model_code"),
    ("eval of a task", "tokenizer_code"),
    ("eval of a task", "pickle_alone"),
    ("export", "model_code"),
    ("prove", "own_reward"),
    ("prove", "reply"),
    ("check", "reward"),
    ("check", "model_code"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind.__name__) in IN_CI else [pytest.mark.slow])
        for name, kind in LOADING
    ],
    ids=named,
)
def test_no_code_of_a_received_run_runs(name, kind, trained, tmp_path, run_klinic):
    received = arm(kind, trained, tmp_path)
    done = run_klinic(*words_of(name, received.run, tmp_path))
    assert not received.has_run, done.stderr
    assert done.returncode in {0, 1, 2}, done.stderr
    assert "Traceback" not in done.stderr
    if name == "prove" and kind in kinds.FUNCTIONS:
        assert "Proof: confirmed." in done.stdout  # none of them is needed for it


@pytest.fixture
def armed_with_all(trained, tmp_path):
    """A run with every kind of canary at once, for commands that read records alone."""
    received = Received(trained, tmp_path)
    kinds.own_reward(received)
    for kind in (kinds.model_code, kinds.tokenizer_code, kinds.pickle_beside, kinds.template):
        kind(received)
    code = received.code

    def change(recipe):
        rows = {"path": str(received.run / "rows.jsonl"), "rewards": [f"{code}:reward"]}
        recipe.update(eval=rows, retention={**rows, "rewards": [f"{code}:reward"]})
        recipe["data"]["map"] = f"{code}:row"
        recipe["sampling"]["reply"] = f"{code}:reply"

    received.change_recipe(change)
    return received


@pytest.mark.parametrize("name", ["diagnose", "report", "terminal report", "watch", "prove"])
def test_reading_a_received_run_runs_nothing_of_it(name, armed_with_all, tmp_path, run_klinic):
    done = run_klinic(*words_of(name, armed_with_all.run, tmp_path))
    assert not armed_with_all.has_run, done.stderr
    assert done.returncode in (0, 1), done.stderr
    if name == "prove":  # a replay loads the model, which cannot be loaded without its code
        assert "Proof: not possible: " in " ".join(done.stdout.split())


def test_what_is_not_run_is_named_with_the_flag_that_runs_it(trained, tmp_path, run_klinic):
    received = arm(kinds.reward, trained, tmp_path)
    done = run_klinic("eval", received.run, "--num", "1", "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["reward"] is None  # the reward is the run's own code
    assert measured["accuracy"]
    assert measured["kl"]["num_completions"] == 1
    assert f"{received.code}:reward" in done.stderr
    assert "--run-code" in done.stderr


def test_what_cannot_be_measured_without_code_is_refused(trained, tmp_path, run_klinic):
    received = arm(kinds.own_reward, trained, tmp_path)
    done = run_klinic("eval", received.run, "--num", "1")
    assert done.returncode == 2
    assert f"rewards: {received.code}:reward" in done.stderr
    assert "Pass --run-code if you trust the author of the run" in done.stderr
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"prompt": "3+3="}\n')
    alone = run_klinic("eval", received.run, "--num", "1", "--prompts", rows)
    assert alone.returncode == 0, alone.stderr
    assert "KL(model || reference)" in alone.stdout
    assert not received.has_run


def test_no_completion_of_a_received_run_is_sent_to_its_judge(trained, tmp_path, run_klinic):
    received = Received(trained, tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as judge:
        judge.settimeout(100)
        url = f"http://127.0.0.1:{judge.getsockname()[1]}/judge"
        received.own_rows([url])
        asked = []

        def answer():
            while True:
                try:
                    asked.append(judge.accept()[0].close())
                except OSError:
                    return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        refused = run_klinic("eval", received.run, "--num", "1")
        assert refused.returncode == 2
        assert url in refused.stderr
        assert asked == []
        run_klinic("eval", received.run, "--num", "1", "--run-code")
        assert asked


# And for teeth: the same canaries run when the user says so.
ALLOWED = {
    "eval": (*kinds.FUNCTIONS, *kinds.MODEL_CODE),
    "export": kinds.MODEL_CODE,
    "prove": (kinds.own_reward, kinds.model_code),
    "check": (kinds.reward,),
    "ablate": (kinds.reward,),
}
ALLOWED_IN_CI = {("eval", "reward"), ("eval", "data_map"), ("export", "model_code")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name, kind, marks=[] if (name, kind.__name__) in ALLOWED_IN_CI else [pytest.mark.slow]
        )
        for name, some in ALLOWED.items()
        for kind in some
    ],
    ids=named,
)
def test_with_the_flag_the_canary_runs_and_is_named_first(
    name, kind, trained, tmp_path, run_klinic
):
    received = arm(kind, trained, tmp_path)
    done = run_klinic(*words_of(name, received.run, tmp_path), "--run-code")
    assert received.has_run, done.stderr
    assert "Running code that the run's recipe.yaml names:" in done.stderr
    what = "model.trust_remote_code" if kind in kinds.MODEL_CODE else str(received.code)
    assert what in done.stderr


CHAT = '{"prompt": [{"role": "user", "content": "1+1="}]}\n'


def own_recipe(received, tmp_path, **model):
    """Write a recipe of the user's, on a model folder that came from a stranger."""
    (tmp_path / "mine.jsonl").write_text(2 * CHAT)
    (tmp_path / "mine.py").write_text(
        "def length(completions, **_):\n    return [float(len(text)) for text in completions]\n"
    )
    recipe = parse_yaml((received.run / "recipe.yaml").read_text(), where="")
    recipe["model"] |= {"name": str(received.run / "start"), "trust_remote_code": False, **model}
    recipe["data"] = {"path": str(tmp_path / "mine.jsonl")}
    recipe["rewards"] = [f"{tmp_path / 'mine.py'}:length"]
    recipe["loop"]["max_steps"] = 1
    recipe["output"]["dir"] = str(tmp_path / "mine")
    (tmp_path / "mine.yaml").write_text(dump_yaml(recipe))
    return tmp_path / "mine.yaml"


OF_A_MODEL = (*kinds.MODEL_CODE, kinds.pickle_alone, kinds.pickle_beside, kinds.template)


@pytest.mark.parametrize(
    "flags", [["--dry-run"], pytest.param([], marks=pytest.mark.slow)], ids=["dry run", "train"]
)
@pytest.mark.parametrize("kind", OF_A_MODEL, ids=named)
def test_training_a_model_of_a_stranger_runs_no_code_of_it(
    kind, flags, trained, tmp_path, run_klinic
):
    received = arm(kind, trained, tmp_path)
    done = run_klinic("train", own_recipe(received, tmp_path), *flags)
    assert not received.has_run, done.stderr
    assert done.returncode in {0, 2}, done.stderr


def test_training_on_a_dataset_with_a_script_runs_no_code_of_it(trained, tmp_path, run_klinic):
    received = arm(kinds.dataset_script, trained, tmp_path)
    recipe = own_recipe(received, tmp_path)
    done = run_klinic("train", recipe, f"data.path={received.run / 'rows'}")
    assert not received.has_run, done.stderr
    assert done.returncode == 2, done.stderr


def test_the_template_of_a_received_model_is_rendered_in_a_sandbox(trained, tmp_path, run_klinic):
    received = arm(kinds.template, trained, tmp_path)
    (tmp_path / "mine.jsonl").write_text(CHAT)
    done = run_klinic("eval", received.run, "--num", "1", "--prompts", tmp_path / "mine.jsonl")
    assert not received.has_run, done.stderr
    assert done.returncode == 2, done.stderr
    assert "unsafe" in done.stderr


@pytest.mark.slow
def test_model_code_runs_where_the_user_s_own_recipe_says_so(trained, tmp_path, run_klinic):
    received = arm(kinds.model_code, trained, tmp_path)
    done = run_klinic("train", own_recipe(received, tmp_path, trust_remote_code=True))
    assert received.has_run, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kinds.own_reward, kinds.model_code], ids=named)
def test_a_recipe_that_the_user_passes_runs_its_code(kind, trained, tmp_path, run_klinic):
    received = arm(kind, trained, tmp_path)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((received.run / "recipe.yaml").read_text())
    out = f"output.dir={tmp_path / 'mine'}"
    where = f"model.name={received.run / 'start'}"
    done = run_klinic("train", recipe, out, where, "loop.max_steps=1")
    assert received.has_run, done.stderr


def test_the_pickle_of_these_tests_runs_when_it_is_loaded(trained, tmp_path):
    received = arm(kinds.pickle_beside, trained, tmp_path)
    file = next(received.run.rglob("pytorch_model.bin"))
    with pytest.raises(RuntimeError, match="magic number"):
        torch.load(file, weights_only=False)
    assert received.has_run


def test_the_template_of_these_tests_runs_outside_of_a_sandbox(trained, tmp_path):
    from jinja2 import Environment

    received = arm(kinds.template, trained, tmp_path)
    file = next(received.run.rglob("chat_template.jinja"))
    Environment(autoescape=True).from_string(file.read_text()).render(messages=[])
    assert received.has_run
