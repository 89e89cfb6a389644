"""Faults of a plain loop that records with `klinic.Recorder`, each beside a healthy relative."""

import pytest

from tabular_loop import diagnose_loop

NO_KL = {"kl_coef": 0.0, "equal_every": 3}
FAULTS = {
    "KL subtracted": ({"kl_factor": -1.0}, "kl-sign-flipped"),
    "KL subtracted, two updates": ({"kl_factor": -1.0, "updates": 2}, "kl-sign-flipped"),
    "KL left out": ({"kl_factor": 0.0}, "kl-not-applied"),
    "advantages with the wrong sign": ({"policy_factor": -1.0}, "policy-gradient-wrong"),
    "no policy term, only a bonus": (
        {"policy_factor": 0.0, "entropy_coef": 0.05, "declares": True},
        "policy-gradient-wrong",
    ),
    "bonus added to the loss": (
        {"entropy_coef": 0.01, "entropy_factor": -1.0},
        "entropy-term-wrong",
    ),
    "a bonus that outweighs the rewards": (
        {"entropy_coef": 1.0, "sharpness": 3.0},
        "entropy-term-wrong",
    ),
    "no zero_grad": ({**NO_KL, "clears_gradient": False}, "gradient-not-cleared"),
    "zero_grad in every second update": ({**NO_KL, "clears_every": 2}, "gradient-not-cleared"),
    "advantages of the token before": ({"advantage_shift": 1}, "misplaced-advantage"),
    "gradients not summed": ({"processes": 2, "sends_gradients": False}, "ranks-diverge"),
    "weights of the start again": ({"lost_at": 8}, "state-lost"),
}
HEALTHY = {
    "as it is": {},
    "two updates": {"updates": 2},
    "no KL": {"kl_coef": 0.0},
    "k1, mean over rows": {"kl_form": "k1", "aggregation": "sequence_mean"},
    "REINFORCE": {"policy_form": "log-prob", "aggregation": "constant"},
    "loss of a quarter": {"loss_scale": 0.25},
    "a small bonus": {"entropy_coef": 0.01},
    "some steps of equal rewards": NO_KL,
    "some steps of equal rewards, with a KL": {"equal_every": 3},
    "advantages by token": {"by_token": True},
    "two processes": {"processes": 2},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name, tmp_path):
    settings, cause = FAULTS[name]
    assert diagnose_loop(tmp_path / "run", **settings).cause == cause


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_relative_is_not(name, tmp_path):
    diagnosis = diagnose_loop(tmp_path / "run", **HEALTHY[name])
    assert not diagnosis.sick, diagnosis.headline
