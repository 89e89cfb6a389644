"""Arguments of `klinic.Recorder`: what cannot be is refused, and nothing is claimed by default."""

import inspect
import io

import jaxtyping
import numpy as np
import pytest
from rich.console import Console

from doctor.test_recorder import COMPLETIONS, GROUP, LOGP, PROMPTS, make, only_record, step
from klinic import Recorder
from klinic.doctor.recorder_settings import RecorderSettings
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence.run_facts import read_run_facts
from klinic.evidence.schema_version import SCHEMA

OUTPUTS = ("doctor", "processes", "console")
POLICY = ("dtype", "dropout", "num_experts", "untrained")
STATED = {
    "temperature": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "logprob_mode": "raw",
    "dtype": "fp32",
    "sampler_dtype": "bf16",
    "dropout": 0.1,
    "num_experts": 0,
    "untrained": False,
    "max_version_lag": 2,
    "kl_estimator": "k3",
    "kl_target": 0.05,
    "reference": "start",
    "reference_sync_every": 20,
    "reference_ema": 0.9,
    "importance_cap": 2.0,
    "shared_forward": False,
    "clip_low": 0.2,
    "clip_high": 0.3,
    "updates_per_generation": 4,
    "max_steps": 40,
    "warmup_steps": 0,
}


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch):
    """Types are checked under pytest only."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logp": [[-0.1], [-0.3], [-0.4] * 3, [-0.7]]}, "step 1: `logp` has 1 values in row 0"),
        ({"logp": LOGP[:3]}, "`logp` has 3 rows, `completion_ids` 4"),
        ({"reward": [1.0]}, "`reward` has 1 rows, `completion_ids` 4"),
        ({"reward": np.ones((4, 1))}, "`reward` has shape \\(4, 1\\)"),
        ({"prompt_ids": PROMPTS[:2]}, "`prompt_ids` has 2 rows, `completion_ids` 4"),
        ({"completion_ids": [np.array([[5]])] * 4}, "`completion_ids` has 2 dimensions in row 0"),
        ({"completion_mask": np.full((4, 2), 7)}, "a mask has one row per completion"),
        ({"completion_mask": [[1, 0], [1]] * 2}, "`completion_mask` is no array"),
        ({"completion_ids": 5}, "`completion_ids` is of type int"),
        ({"completion_ids": [[5, -100], *COMPLETIONS[1:]]}, "contains -100, and a token id is 0"),
        ({"completion_ids": [[5.5, 6], *COMPLETIONS[1:]]}, "`completion_ids` contains 5.5"),
        ({"prompt_ids": ["a", "b", "c", "d"]}, "`prompt_ids` has 0 dimensions in row 0"),
        ({"prompt_ids": [["a"]] * 4}, "`prompt_ids` contains .*a.*. Pass numbers"),
        ({"reward": ["good"] * 4}, "`reward` contains .*good.*. Pass numbers"),
        ({"reward": [None, 1, 1, 1]}, "`reward` holds object values"),
        ({"reward": [[1.0], [1.0, 2.0], [1.0], [1.0]]}, "`reward` is no array"),
        ({"reward": 1.0}, "`reward` has shape \\(\\). Pass one value per completion"),
        ({"advantage": 0.5}, "`advantage` has shape \\(\\). Pass one value per completion"),
        ({"group": [0.5, 0, 1, 1]}, "`group` contains 0.5. Pass integers"),
        ({"loss_mask": [[1, 2], [1], [1, 1, 1], [1]]}, "`loss_mask` contains 2. Pass 0 and 1"),
        ({"emitted_by": [[0, 3], [0], [0] * 3, [0]]}, "contains 3. Use 0 .policy., 1 .tool., 2 .t"),
        ({"finish_reason": ["stopped"] * 4}, "'stopped'. Did you mean stop. Use one of stop, len"),
        ({"finish_reason": [1] * 4}, "`finish_reason` contains .*1.*. Pass strings"),
        ({"weight_version": "new"}, "`weight_version` has shape ..\\. Pass one value per"),
        ({"learner_version": 1.5}, "`learner_version` is 1.5. Pass a number of updates"),
        ({"grad_norm": "large"}, "`grad_norm` is 'large'. Pass one number"),
        ({"kl_coef": [0.1, 0.2]}, "`kl_coef` is of shape \\(2,\\). Pass one number"),
        ({"parse_rate": [0.1] * 4}, "`parse_rate` is of shape"),
        ({"rank_weights": "ab"}, "`rank_weights` is one string"),
        ({"weights_loaded": np.ones(3)}, "`weights_loaded` is of type ndarray. Pass a hash"),
        ({"group": None}, "no `group` was passed"),
        ({"reward_parts": {"a": ["x"] * 4}}, "`reward_parts\\[a\\]` contains"),
    ],
)
def test_wrong_shapes_are_refused_with_where_and_what(tmp_path, changes, message):
    recorder = make(tmp_path / "run", doctor="none")
    with recorder, pytest.raises(EvidenceError, match=message):
        step(recorder, **{"group": GROUP, **changes})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loss": "grpoo"}, "`loss` is 'grpoo'. Did you mean grpo. Use one of grpo, dr_grpo"),
        ({"loss": "ppo"}, "Did you mean grpo. .* or leave it out: unknown is the default"),
        ({"kl_estimator": "k4"}, "`kl_estimator` is 'k4'. .*Use one of unbiased, exact"),
        ({"kl_estimator": "low_var_kl"}, "Did you mean k3"),
        ({"dtype": "float32"}, "`dtype` is 'float32'. Did you mean fp32"),
        ({"sampler_dtype": "bfloat16"}, "`sampler_dtype` is 'bfloat16'. Did you mean bf16"),
        ({"advantage": "group-std"}, "`advantage` is 'group-std'. Did you mean group_std"),
        ({"aggregation": "token-mean"}, "`aggregation` is 'token-mean'. Did you mean token_mean"),
        ({"logprob_mode": "row"}, "`logprob_mode` is 'row'. Did you mean raw"),
        ({"doctor": "warn"}, "`doctor` is 'warn'. .*Use one of tell, stop, none"),
        ({"doctor": True}, "`doctor` is true. Use one of"),
        ({"temperature": -1}, "`temperature` is -1: .*Use 0 or more"),
        ({"top_p": 95}, "`top_p` is 95: .*at most 1"),
        ({"group_size": 8.5}, "`group_size` is 8.5: it must be an integer"),
        ({"group_size": "8"}, "`group_size` is '8': it must be an integer"),
        ({"eos_ids": 6}, "`eos_ids` is 6: Pass a list of token ids"),
        ({"eos_ids": "end"}, "`eos_ids` is 'end': Pass a list of token ids"),
        ({"dropout": True}, "`dropout` is true: it must be a number"),
        ({"untrained": "yes"}, "`untrained` is 'yes': it must be true or false"),
        ({"clip_low": 1.2, "group_size": 0}, "`group_size` is 0: .*`clip_low` is 1.2: "),
        ({"max_steps": 0}, "`max_steps` is 0: it is a count. Use 1 or more"),
        ({"warmup_steps": 0.1}, "`warmup_steps` is 0.1: it must be an integer"),
        ({"token_texts": ["a", "b"]}, "`token_texts` is a list. Pass a mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_offered_values(tmp_path, setting, message):
    given = {"advantage": "group_mean", **setting}
    with pytest.raises(ConfigError, match=message):
        Recorder(tmp_path / "run", console=Console(file=io.StringIO()), **given)
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_settings_and_facts(tmp_path):
    settings = {"eos_ids": np.array([6]), "group_size": np.int64(2), "top_p": np.float32(0.5)}
    with make(tmp_path / "run", doctor="none", **settings) as recorder:
        step(recorder, group=GROUP, kl_coef=np.float32(0.5), grad_norm=np.array([2.0]))
    facts = read_run_facts(tmp_path / "run")
    assert (facts["eos_ids"], facts["group_size"], facts["sampling"]) == ([6], 2, {"top_p": 0.5})
    assert only_record(tmp_path / "run").facts["kl_coef"] == 0.5
    assert only_record(tmp_path / "run").facts["grad_norm"] == 2.0


def test_a_loop_that_states_nothing_claims_nothing(tmp_path):
    with Recorder(tmp_path / "run", doctor="none") as recorder:
        step(recorder, group=GROUP)
    facts = read_run_facts(tmp_path / "run")
    assert facts == {"schema": SCHEMA, "sampling": {}, "policy": {}, "sampler": {}}
    default = inspect.signature(Recorder).parameters
    assert {name: p.default for name, p in default.items() if p.default is not None} == {
        "folder": inspect.Parameter.empty,
        "doctor": "tell",
    }


def test_every_setting_is_an_argument_and_reaches_the_run(tmp_path):
    arguments = set(inspect.signature(Recorder).parameters)
    assert arguments == {*RecorderSettings.model_fields, "folder", "token_texts", *OUTPUTS}
    with make(tmp_path / "run", doctor="none", **STATED):
        pass
    facts = read_run_facts(tmp_path / "run")
    assert facts["sampling"] == {"temperature": 0.5, "top_k": 4, "min_p": 0.1}
    assert facts["policy"] == {name: STATED[name] for name in POLICY}
    assert facts["sampler"] == {"dtype": "bf16", "max_version_lag": 2}
    assert facts["loss"] == {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0}
    assert facts["kl_target"] == 0.05
    assert facts["reference"] == {"wanted": "start", "sync_every": 20, "ema": 0.9}
    assert (facts["logprob_mode"], facts["estimator"]) == ("raw", "k3")
    assert facts["logp_old"] == "scored"
    assert facts["updates_per_generation"] == 4
    assert (facts["max_steps"], facts["warmup_steps"]) == (40, 0)
