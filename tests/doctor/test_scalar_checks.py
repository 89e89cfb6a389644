"""Signs in scalars: each fires, each stays silent on health, and none says more than it knows."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

from foreign_logs import healthy, trl_entries, write_all, write_newer

from klinic.checks import CHECKS
from klinic.doctor.scalars.check import ScalarCheck
from klinic.doctor.scalars.examine import SIGNS, examine_log
from klinic.evidence import fields
from klinic.evidence.readers.find import read_log
from klinic.evidence.readers.log import LogBuilder
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS
from klinic.evidence.verdict import Verdict

NAMES = {check.name for check in CHECKS}
PATH = Path("log.jsonl")


def log_of(entries):
    gathered = LogBuilder()
    for entry in entries:
        gathered.add(entry["step"], entry)
    return gathered.build_log(format="JSON lines", files=(PATH,))


def heard(entries, name):
    return {s.name: h for s, h in examine_log(log_of(entries)).findings}[name]


def sick(change, *, steps=200, since=0, seed=0):
    """Return a healthy log, changed in every entry from one on."""
    entries = trl_entries(healthy(steps, seed))
    for place, entry in enumerate(entries[since:]):
        change(entry, place)
    return entries


def put(**values):
    return lambda entry, _: entry.update({k.replace("__", "/"): v for k, v in values.items()})


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 60, 400])
def test_a_healthy_log_gives_no_alarm(steps, every):
    for seed in range(4 if steps < 400 else 8):
        entries = trl_entries(healthy(max(steps, every), seed), every=every)
        found = examine_log(log_of(entries))
        assert not found.sick, [h.summary for _, h in found.with_verdict(Verdict.FAIL)]
        assert found.cause is None


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_log_of_any_trainer_gives_no_alarm(tmp_path, seed):
    logs = write_all(tmp_path, steps=60, seed=seed) | write_newer(tmp_path, steps=60, seed=seed)
    del logs["tokens"]  # no scalars
    for path in logs.values():
        found = examine_log(read_log(path))
        assert found.verdict == "none", (
            path,
            [h.summary for _, h in found.with_verdict(Verdict.FAIL)],
        )


def test_one_prompt_a_step_is_no_alarm():
    """Groups are equal or not in a whole step then, often several times in a row."""
    import random

    for seed in range(6):
        chance = random.Random(seed)  # noqa: S311 - made-up numbers
        entries = trl_entries(healthy(1000, seed))
        for entry in entries:
            equal = chance.random() < 0.5
            entry["frac_reward_zero_std"] = float(equal)
            entry["reward_std"] = 0.0 if equal else 0.4
            entry["grad_norm"] = 0.0 if equal else entry["grad_norm"]
        assert not examine_log(log_of(entries)).sick


@pytest.mark.parametrize(
    "change",
    [
        put(loss=0.0),  # one update a batch: the value is 0, its gradient is not
        put(kl=None),  # beta 0, in a version that logs null
        lambda entry, _: entry.pop("kl"),  # beta 0
        put(kl=math.nan),
        lambda entry, place: entry.update(loss=0.01 * place),  # it rises with the KL
        lambda entry, place: entry.update(kl=0.0004 + place * 5e-3),  # far, and the reward rises
        lambda entry, place: place == 100 and entry.update(kl=50.0),  # a token of format
        lambda entry, place: place == 100 and entry.update(grad_norm=math.nan),  # fp16
        lambda entry, place: place == 0 and entry.update(grad_norm=math.inf),  # fp16
        lambda entry, place: place == 100 and entry.update(grad_norm=500.0),
        lambda entry, place: place == 100 and entry.update(reward=None),  # not applicable
        lambda entry, place: place % 2 and (entry.pop("reward"), entry.pop("reward_std")),
        lambda entry, place: place > 150 and entry.update(reward=1.0, reward_std=0.0),
        lambda entry, place: place > 100 and entry.update({"completions/clipped_ratio": 1.0}),
        put(learning_rate=0.0),
    ],
)
def test_what_people_mistake_for_a_fault_is_none(change):
    entries = sick(change)
    found = examine_log(log_of(entries))
    assert not found.sick, [h.summary for _, h in found.with_verdict(Verdict.FAIL)]


FAULTS = {
    "not-a-number": (put(loss=math.nan), 100, "nan-outside-mask"),
    "gradient-explodes": (put(grad_norm=900.0), 120, "step-too-big"),
    "no-gradient": (put(grad_norm=0.0, kl=0.0), 100, "policy-does-not-move"),
    "missing-rewards": (put(reward=math.nan), 100, "broken-reward"),
    "equal-rewards": (
        put(frac_reward_zero_std=1.0, reward_std=0.0, reward=0.0),
        0,
        "equal-rewards",
    ),
    "cut-off": (put(completions__clipped_ratio=0.99), 0, "context-truncated"),
    "kl-at-step-0": (put(kl=15.0), 0, "wrong-reference"),
    "negative-kl": (put(kl=-0.05), 50, "wrong-metric"),
    "kl-stays-0": (put(kl=0.0), 0, "policy-does-not-move"),
    "sampler-far-from-learner": (
        put(sampling__sampling_logp_difference__mean=0.2),
        40,
        "stale-sampler",
    ),
    "drift-without-reward": (
        lambda entry, place: entry.update(kl=0.3 + 0.01 * place, reward=0.5 - 0.005 * place),
        100,
        "step-too-big",
    ),
}


TRIED_ALONE = (
    *("equal-completions", "samples-get-older", "kl-loss-is-k1", "kl-falls-at-restart"),
    "kl-applied-twice",
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_sign_fires_where_it_should(name):
    change, since, first = FAULTS[name]
    said = heard(sick(change, since=since, steps=320), name)
    assert said.verdict is Verdict.FAIL, said.summary
    assert said.could_be[0] == first
    late = 130 if name == "drift-without-reward" else 40  # it asks what the drift bought
    assert since < said.step <= since + late
    assert all(map(math.isfinite, said.measured.values()))


def test_every_sign_is_tried():
    assert {sign.name for sign in SIGNS} == {*FAULTS, *TRIED_ALONE}


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_signs_speak_of_causes_and_fields_that_there_are(sign: ScalarCheck):
    places = {
        "record": {*TOKEN_FIELDS, *ROW_FIELDS, "reward_parts", "prompt_ids"},
        "facts": fields.FACTS,
        "run": fields.RUN_KEYS,
        "probes": fields.PROBES,
    }
    assert sign.text.startswith("Look for")
    assert sign.decided_by
    for need in sign.decided_by:
        place, _, field = need.partition(".")
        assert field in places[place], need


def test_causes_are_those_of_the_catalogue():
    for change, since, _ in FAULTS.values():
        for _, said in examine_log(log_of(sick(change, since=since))).findings:
            assert set(said.could_be) <= NAMES
            assert bool(said.could_be) == (said.verdict is Verdict.FAIL)


@pytest.mark.parametrize(
    "name", ["equal-rewards", "cut-off", "kl-at-step-0", "drift-without-reward"]
)
def test_what_the_catalogue_knows_behind_a_cause_is_listed(name):
    change, since, first = FAULTS[name]
    said = heard(sick(change, since=since, steps=320), name)
    behind = {check.name for check in CHECKS if first in check.explains}
    behind -= {"teacher-as-reference"}  # scalars of a teacher have names that no trainer here logs
    if name == "drift-without-reward":
        behind -= {"reward-hacking"}  # which needs a reward that rises
    assert behind | {first} <= set(said.could_be)


def test_a_cause_is_named_only_where_one_is_left():
    assert examine_log(log_of(sick(put(reward=None), since=50))).cause == "broken-reward"
    stuck = examine_log(log_of(sick(put(grad_norm=0.0, kl=0.0), since=50)))
    assert stuck.cause == "policy-does-not-move"
    assert examine_log(log_of(sick(put(kl=15.0)))).cause is None


def test_the_first_sign_counts():
    """A NaN that comes when the gradient has exploded long before is its effect."""

    def change(entry, place):
        entry.update(grad_norm=900.0, reward=None if place > 60 else 0.5)

    found = examine_log(log_of(sick(change, since=50)))
    assert found.with_verdict(Verdict.FAIL)[0][0].name == "gradient-explodes"
    assert found.cause is None


def test_a_missing_key_in_the_middle_is_what_trl_makes_of_nan():
    entries = sick(lambda entry, _: entry.pop("kl"), since=100)
    said = heard(entries, "not-a-number")
    assert said.verdict is Verdict.FAIL
    assert said.step == 101
    assert "missing" in said.summary


def test_a_missing_key_says_nothing_where_the_trainer_writes_nan():
    entries = sick(lambda entry, _: entry.pop("kl"), since=100)
    for entry in entries:  # klinic's own
        entry.update({"policy_loss": 0.0, "kl_penalty": 0.0, "time/learn": 1.0, "kl_coef": 0.1})
        entry.update({"update_norm": 1.0, "advantage/max": 1.0})
    assert heard(entries, "not-a-number").verdict is Verdict.PASS


def test_an_infinite_kl_is_an_exponential():
    said = heard(sick(put(kl=math.inf), since=80), "not-a-number")
    assert said.could_be[0] == "kl-tail-dominates"


def test_a_mean_over_ten_steps_is_not_step_0():
    entries = trl_entries(healthy(200), every=10)
    entries[0]["kl"] = 0.3
    said = heard(entries, "kl-at-step-0")
    assert said.verdict is Verdict.WARN
    assert "steps 1 to 10" in said.summary


def test_a_log_that_begins_in_the_middle_has_no_step_0():
    entries = [{**e, "kl": 15.0} for e in trl_entries(healthy(100))[50:]]
    assert heard(entries, "kl-at-step-0").verdict is Verdict.NO_DATA


def test_a_norm_of_0_of_a_policy_that_moves_is_a_wrong_norm():
    entries = sick(put(grad_norm=0.0))
    assert heard(entries, "no-gradient").could_be == ("wrong-metric",)


def test_a_norm_of_0_without_a_kl_may_be_either():
    def change(entry, _):
        entry.update(grad_norm=0.0)
        del entry["kl"]

    assert heard(sick(change), "no-gradient").could_be == ("policy-does-not-move", "wrong-metric")


def test_a_gap_from_the_start_has_other_causes_than_one_that_comes():
    gap = put(sampling__sampling_logp_difference__mean=0.2)
    at_once = heard(sick(gap), "sampler-far-from-learner")
    assert "stale-sampler" not in at_once.could_be
    assert at_once.could_be[0] == "temperature-on-one-side"


def test_a_sampler_that_never_follows_is_right_in_the_first_step():
    gap = put(sampling__sampling_logp_difference__mean=0.2)
    assert heard(sick(gap, since=1), "sampler-far-from-learner").could_be[0] == "stale-sampler"


def test_a_signed_kl_below_0_is_of_tokens_that_others_drew():
    entries = [
        {"step": e["step"], "policy_loss": 0.0, "ppo_kl": 0.0, "reward": e["reward"], "kl": -0.05}
        for e in healthy(60)
    ]
    said = heard(entries, "negative-kl")
    assert said.verdict is Verdict.FAIL
    assert said.could_be[0] == "stale-sampler"


def test_equal_completions_are_seen_in_rollouts(tmp_path):
    from foreign_logs import write_rollouts

    found = examine_log(read_log(write_rollouts(tmp_path, text="again")))
    said = {sign.name: h for sign, h in found.findings}
    assert said["equal-completions"].could_be[0] == "broken-sampler"
    well = examine_log(read_log(write_rollouts(tmp_path)))
    assert not well.sick


def test_scalars_rule_nothing_out_and_name_what_would():
    told = examine_log(log_of(trl_entries(healthy(60)))).to_json()
    assert told["evidence"] == "scalars"
    assert told["ruled_out"] == []
    assert told["confidence"] == 0.0
    assert "record.logp_sampler" in told["missing"]
    assert told["read"]["metrics"]["sampler/gap"] == "sampling/sampling_logp_difference/mean"


def test_90_runs_of_the_studies_alarm_only_where_the_rate_was_too_large():
    """Real runs, of which only metrics were kept."""
    parquet = pytest.importorskip("pyarrow.parquet")
    studies = Path(__file__).parents[2] / "docs" / "studies"
    runs = {}
    for name in ("coefficient", "estimators", "lora", "chess"):
        for row in parquet.read_table(studies / name / "steps.parquet").to_pylist():
            key = name, row.pop("setting"), row.pop("seed")
            known = {metric: value for metric, value in row.items() if value is not None}
            runs.setdefault(key, []).append(known)
    sick = {key for key, entries in runs.items() if examine_log(log_of(entries)).sick}
    assert len(runs) == 90
    rate = "model.lora_rank=null learner.learning_rate=2e-3"
    assert sick == {("lora", rate, seed) for seed in (1, 2, 3)}


def test_the_worst_of_several_gaps_counts():
    entries = [
        {"step": e["step"], "gen_kl_error": 0.0004, "token_mult_prob_error": 3.0, "reward": 1.0}
        for e in healthy(60)
    ]
    said = heard(entries, "sampler-far-from-learner")
    assert said.verdict is Verdict.FAIL
    assert "`token_mult_prob_error` is 3 times from the start" in said.summary


def test_a_mean_of_exponentials_has_limits_of_its_own():
    for error, says in ((1.02, Verdict.PASS), (1.06, Verdict.WARN), (1.2, Verdict.FAIL)):
        entries = [{"step": e["step"], "token_mult_prob_error": error} for e in healthy(60)]
        assert heard(entries, "sampler-far-from-learner").verdict is says


def test_one_infinite_mean_reward_is_enough_and_one_missing_is_not():
    for value, verdict in ((-math.inf, Verdict.FAIL), (math.nan, Verdict.WARN)):
        entries = sick(lambda entry, place, v=value: place == 80 and entry.update(reward=v))
        said = heard(entries, "missing-rewards")
        assert said.verdict is verdict, said.summary
        assert said.step == 81


def test_rewards_that_are_not_logged_are_not_called_numbers():
    entries = sick(lambda entry, _: entry.pop("reward"))
    assert heard(entries, "missing-rewards").verdict is Verdict.NO_DATA


def test_the_verdict_of_a_log():
    entries = trl_entries(healthy(60))
    assert examine_log(log_of(entries)).verdict == "none"
    assert examine_log(log_of(entries)).not_found == ()
    likely = examine_log(log_of(sick(put(kl=15.0))))
    assert (likely.verdict, likely.cause) == ("likely", None)
    assert likely.causes[0].name == "wrong-reference"
    assert likely.causes[0].steps[0].startswith("Pass the start model itself")
    assert sum(cause.confidence for cause in likely.causes) == pytest.approx(0.9)
    loss = [{"step": e["step"], "loss": e["loss"], "grad_norm": e["grad_norm"]} for e in entries]
    assert examine_log(log_of(loss)).verdict == "unread"
    assert examine_log(log_of(loss)).not_found == ("KL", "reward", "sampler gap")
    exploding = [{**e, "grad_norm": 900.0 if e["step"] > 30 else 0.3} for e in loss]
    assert examine_log(log_of(exploding)).verdict == "likely"
    unscored = [{**e, "reward": math.nan} for e in loss]
    assert examine_log(log_of(unscored)).verdict == "cause"
    assert "reward" not in examine_log(log_of(unscored)).not_found


def with_ages(ages):
    entries = [
        {
            "step": step,
            "ppo_actor/update/actor_loss/avg": 0.1,
            "ppo_actor/update/clip_ratio/avg": 0.0,
            "ppo_actor/task_reward/avg": 0.5,
            "ppo_actor/update/version_stats/sample_staleness_theta_max": age,
        }
        for step, age in enumerate(ages)
    ]
    return heard(entries, "samples-get-older")


def test_samples_that_get_older_after_they_were_steady_are_a_sign():
    finding = with_ages([0, 1, *[2] * 14, *[3, 4, 5] * 3, *[6] * 6])
    assert finding.verdict is Verdict.FAIL
    assert finding.could_be == ("samples-too-old", "state-lost")


@pytest.mark.parametrize(
    "ages", [[0, 1, *[2] * 28], [min(step, 8) for step in range(60)], [0, 1, 2, 3, 2] * 8]
)
def test_a_steady_or_rising_age_is_no_fault(ages):
    assert with_ages(ages).verdict is not Verdict.FAIL


def test_a_negative_kl_points_to_the_mask_where_tools_answer():
    entries = [
        {"step": n, "critic/kl": -0.2, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}
        for n in range(1, 30)
    ]
    assert heard(entries, "negative-kl").could_be[0] == "stale-sampler"
    for entry in entries:
        entry["env/number_of_valid_search"] = 1.0
    assert heard(entries, "negative-kl").could_be[0] == "wrong-loss-mask"
    for entry in entries:
        entry["training/rollout_probs_diff_mean"] = 0.003
    assert "stale-sampler" not in heard(entries, "negative-kl").could_be


@pytest.mark.parametrize(("kl", "first"), [(0.01, "corrupted-sync"), (5.0, "stale-sampler")])
def test_a_sampler_farther_than_the_policy_moved_has_damaged_weights(kl, first):
    entries = sick(put(kl=kl))
    for place, entry in enumerate(entries):
        entry["sampling/sampling_logp_difference/mean"] = 0.003 if place < 3 else 2.0
    assert heard(entries, "sampler-far-from-learner").could_be[0] == first


@pytest.mark.parametrize(("same", "verdict"), [(True, Verdict.FAIL), (False, Verdict.PASS)])
def test_a_loss_with_the_mean_log_ratio_is_told_from_other_estimators(same, verdict):
    entries = [
        {
            "step": n,
            "objective/kl0_avg": 0.01 * n,
            "objective/kl1_avg": 0.01 * n,
            "objective/kl3_avg": 0.012 * n,
            "loss/policy_avg": 0.1,
            "loss/kl_avg": 0.05 * (0.01 * n if same else 0.01 * n + 0.002 * (n % 3)),
        }
        for n in range(1, 20)
    ]
    finding = heard(entries, "kl-loss-is-k1")
    assert finding.verdict is verdict
    assert finding.could_be == (("kl-gradient-wrong",) if same else ())


@pytest.mark.parametrize(("in_loss", "verdict"), [(0.01, Verdict.FAIL), (0.0, Verdict.PASS)])
def test_a_kl_in_reward_and_loss_counts_twice(in_loss, verdict):
    entries = [
        {
            "step": n,
            "actor/kl_loss": 0.1,
            "actor/kl_coef": in_loss,
            "actor/reward_kl_penalty": 0.1,
            "actor/reward_kl_penalty_coeff": 0.05,
            "actor/ppo_kl": 0.0,
            "actor/pg_clipfrac": 0.0,
        }
        for n in range(1, 20)
    ]
    finding = heard(entries, "kl-applied-twice")
    assert finding.verdict is verdict
    assert finding.could_be == (("kl-not-applied",) if in_loss else ())


def restarted(first_kl, *, reward=None):
    before = log_of(trl_entries(healthy(40)))
    later = trl_entries(healthy(40))
    for place, entry in enumerate(later):
        entry["step"] += 40
        entry["kl"] = first_kl + 1e-4 * place
        if reward is not None:
            entry["reward"] = reward
    log = replace(log_of(later), before=before)
    return {s.name: h for s, h in examine_log(log).findings}["kl-falls-at-restart"]


def test_a_kl_that_starts_again_where_a_run_continues_is_a_new_reference():
    at_end = log_of(trl_entries(healthy(40))).column("reward")[-1]
    assert restarted(0.0, reward=at_end).could_be[0] == "moved-reference"
    at_start = log_of(trl_entries(healthy(40))).column("reward")[0]
    assert restarted(0.0, reward=at_start).could_be[0] == "state-lost"
    end = log_of(trl_entries(healthy(40))).column("kl")[-1]
    assert restarted(end).verdict is Verdict.PASS
