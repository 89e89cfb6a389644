"""Names of own loops: which are taken for which metric, and which for none."""

import pytest

from klinic.evidence.readers.log import LogBuilder
from klinic.evidence.readers.own_names import recognise_metric


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        *((name, "kl") for name in ("kl", "KL", "kl_div", "train/kl_mean", "kl_to_ref", "KLDiv")),
        *((name, "reward") for name in ("reward_mean", "meanReward", "avg return", "score")),
        *(
            (name, "grad_norm")
            for name in ("gradNorm", "gradient-norm", "gnorm", "total_grad_norm")
        ),
        ("std_reward", "reward_std"),
        ("reward.max", "reward/max"),
        ("LR", "learning_rate"),
        ("truncated_frac", "completions/clipped_ratio"),
    ],
)
def test_usual_names_are_recognised(name, metric):
    assert recognise_metric(name) == metric


@pytest.mark.parametrize(
    "name",
    [
        # the KL between two states of the policy, not to the reference
        *("approx_kl", "ppo_kl", "old_kl", "policy_kl", "kl_coef", "kl_penalty_coef", "kl_sum"),
        *("eval_reward", "eval/kl", "format_reward", "value_loss", "clip_ratio", "reward_scale"),
        *("", "x" * 10_000, "kl" * 5_000),
    ],
)
def test_names_with_another_meaning_are_not(name):
    assert recognise_metric(name) is None


def build(entry):
    builder = LogBuilder()
    builder.add(1, entry)
    return builder.build_log(format="", files=())


def test_an_exact_name_is_read_before_a_usual_one():
    assert build({"kl_div": 2.0, "kl": 1.0}).column("kl") == (1.0,)
    assert build({"score": 2.0, "reward": 1.0}).unknown == ("score",)


def test_a_known_trainer_is_read_by_its_own_names_alone():
    trl = {"completions/mean_length": 1.0, "num_tokens": 1.0, "loss": 0.1}
    log = build({**trl, "kl_div": 1.0})
    assert log.trainer.name == "TRL"
    assert (
        log.unknown == ("kl_div", "completions/mean_length", "num_tokens")
        or "kl" not in log.columns
    )
