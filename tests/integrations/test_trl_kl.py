"""klinic's KL term inside TRL's loss, and what is done about trouble there."""

import io
import math

import pytest
import torch
from rich.console import Console

from integrations.trainers import make_trainer, save_start, weights

pytest.importorskip("trl")

import klinic
from klinic.errors import ConfigError, EvidenceError, RunStoppedError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.metrics import mean_k1
from klinic.integrations.trl.kl_checkpoint import STATE_FILE, load_kl_state
from klinic.integrations.trl.kl_term import KlinicKLTerm

pytestmark = pytest.mark.timeout(300)
WORDS = 5


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("trl") / "start")


def quiet():
    return Console(file=io.StringIO())


@pytest.mark.parametrize("estimator", ["unbiased", "k2", "k3_ratio", "k1_reward_immediate"])
def test_the_expected_gradient_is_that_of_the_kl(start, tmp_path, estimator):
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, loss_type="dr_grpo")
    trainer.current_gradient_accumulation_steps = 1
    theta = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.7], dtype=torch.float64, requires_grad=True)
    logp_ref = torch.tensor([0.1, 0.4, -0.3, 0.2, -0.1], dtype=torch.float64).log_softmax(0)
    term = KlinicKLTerm(trainer, klinic.KL(coef=0.7, estimator=estimator))
    logp = theta.log_softmax(0)
    exact = (logp.exp() * (logp - logp_ref)).sum()
    (wanted,) = torch.autograd.grad(exact, theta, retain_graph=True)
    found = torch.zeros_like(theta)
    for word in range(WORDS):  # every completion of one token, as often as the policy says it
        batch = {
            "completion_mask": torch.ones(1, 1, dtype=torch.int64),
            "ref_per_token_logps": logp_ref[word].reshape(1, 1),
        }
        loss = term.add_to_loss(
            torch.zeros((), dtype=torch.float64), logp[word].reshape(1, 1), batch
        )
        (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
        found += logp[word].exp().detach() * gradient
    share = 0.7 / trainer.max_completion_length  # what dr_grpo divides by
    torch.testing.assert_close(found, share * wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "dapo"])
def test_k3_at_the_same_coefficient_is_trls_own_term(start, tmp_path, loss_type):
    def trained(name, beta, **how):
        trainer = make_trainer(
            start,
            tmp_path / name,
            beta=beta,
            use_bias_correction_kl=False,
            loss_type=loss_type,
            optim="sgd",  # so that weights move as gradients say
            learning_rate=0.1,
        )
        if how:
            klinic.attach(trainer, tmp_path / f"{name}-run", console=quiet(), **how)
        trainer.train()
        return weights(trainer), [line["loss"] for line in trainer.state.log_history[:-1]]

    theirs, losses = trained("theirs", 0.5)
    ours, same = trained("ours", 0.0, kl=klinic.KL(coef=0.5, estimator="k3"))
    assert same == pytest.approx(losses, abs=2e-5)
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p, rtol=1e-5, atol=1e-6, msg=name)
    replaced, _ = trained("replaced", 0.1, kl=klinic.KL(coef=0.5, estimator="k3"))
    for name, p in theirs.items():  # TRL's own coefficient has no say any more
        torch.testing.assert_close(replaced[name], p, rtol=1e-5, atol=1e-6, msg=name)


def test_a_controller_moves_the_coefficient_and_the_doctor_looks_at_our_term(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, max_steps=6)
    term = klinic.KL(coef=0.01, controller="dual_ascent", target=0.001)
    klinic.attach(trainer, tmp_path / "run", kl=term, console=quiet())
    trainer.train()
    used = [store.read_record(tmp_path / "run", step).facts["kl_coef"] for step in range(1, 7)]
    assert used[0] == 0.01
    assert used[-1] > 0.01
    assert [line["kl_coef"] for line in trainer.state.log_history[:-1]] == pytest.approx(used)
    asked = Journal(tmp_path / "run" / "probes.jsonl").entries()
    answers = {a["step"]: a for a in asked if a["probe"] == "kl_gradient"}
    assert answers[4]["looks_like"] == "unbiased"
    assert answers[4]["ratio"] == pytest.approx(1.0, abs=1e-3)


STEERED = {"coef": 0.01, "controller": "log_pi", "target": 0.5, "warmup_steps": 1}
SAVED = 3  # within an epoch: at the end of one, TRL alone resumes with other prompts


def train_steered(start, folder, *, resume=None, **settings):
    """Return the coefficients and the final weights of a run of klinic's KL under TRL."""
    how = {"beta": 0.0, "max_steps": 7, "save_strategy": "steps", "save_steps": SAVED, **settings}
    trainer = make_trainer(start, folder / "out", **how)
    run = folder / ("run" if resume is None else "resumed")
    with klinic.attach(trainer, run, kl=klinic.KL(**STEERED), console=quiet()):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    steps = store.complete_steps(run)
    coefs = [store.read_record(run, step).facts["kl_coef"] for step in steps]
    return coefs, weights(trainer), run


def test_a_resumed_trl_run_is_the_same_to_the_last_bit(start, tmp_path):
    coefs, whole, run = train_steered(start, tmp_path)
    checkpoint = tmp_path / "out" / f"checkpoint-{SAVED}"
    resumed_coefs, resumed, resumed_run = train_steered(start, tmp_path, resume=checkpoint)
    assert coefs[SAVED] != STEERED["coef"]
    assert len(set(coefs[SAVED:])) == 4
    assert resumed_coefs == coefs[SAVED:]
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    for step in range(SAVED + 1, 8):
        before, after = (store.read_record(place, step) for place in (run, resumed_run))
        assert (before.logp_old == after.logp_old).all()
    ends = [tmp_path / "out" / f"checkpoint-{step}" / STATE_FILE for step in (SAVED, 6)]
    assert load_kl_state(ends[1].parent).done_steps == 6
    assert ends[0].read_bytes() != ends[1].read_bytes()


def test_a_checkpoint_without_a_controller_is_reported_and_its_warm_up_is_over(start, tmp_path):
    train_steered(start, tmp_path, max_steps=SAVED)
    checkpoint = tmp_path / "out" / f"checkpoint-{SAVED}"
    (checkpoint / STATE_FILE).unlink()
    coefs, _, run = train_steered(start, tmp_path, resume=checkpoint, max_steps=SAVED + 1)
    assert coefs == [0.01]
    (event,) = [
        e
        for e in Journal(run / "events.jsonl").entries()
        if e["event"] == "kl controller not restored"
    ]
    assert event["step"] == SAVED
    assert "The KL coefficient starts at 0.01" in event["says"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 2, "done_steps": 4, "kl": {"coef": 1.0}}', "schema 2"),
        ('{"schema": 1, "done_steps": 4}', "not the state"),
        ('{"schema": 1, "done_steps": 4, "kl": {"coef": 1.0, "phase": 2}}', "not the state"),
        ('{"schema": 1, "done', "not JSON"),
    ],
)
def test_a_controller_state_that_cannot_be_read_is_refused(tmp_path, text, reason):
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(EvidenceError, match=reason):
        load_kl_state(tmp_path)


def test_what_cannot_be_had_in_trl_is_refused(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out")
    with pytest.raises(ConfigError, match="the whole vocabulary"):
        klinic.attach(trainer, tmp_path / "a", kl=klinic.KL(estimator="exact"))
    with pytest.raises(ConfigError, match="update_kl_limit"):
        klinic.attach(trainer, tmp_path / "b", recovery=klinic.Recovery(update_kl_limit=1.0))
    with pytest.raises(ConfigError, match=r"KL\(coef\).*Available keys: coef, estimator"):
        klinic.KL(coef=-1.0)
    with pytest.raises(ConfigError, match=r"KL\(beta\)"):
        klinic.KL(beta=0.1)


def poison(trainer, at):
    """Let one weight's gradient be no number in some steps."""
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda g: g * math.nan if trainer.state.global_step + 1 in at else g)


def test_an_update_that_is_no_number_is_left_out(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", max_steps=4)
    poison(trainer, {2})
    klinic.attach(trainer, tmp_path / "run", recovery=klinic.Recovery(lr_steps=1), console=quiet())
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    lines = list(Journal(tmp_path / "run" / "metrics.jsonl").entries())
    assert [line["discarded"] for line in lines] == [0.0, 1.0, 0.0, 0.0]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-2])
    (event,) = [
        e for e in Journal(tmp_path / "run" / "events.jsonl").entries() if e["event"] == "trouble"
    ]
    assert "The update was skipped; learning rate x 0.1 for 1 update" in event["says"]


def test_too_many_in_a_row_stop_the_run(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", max_steps=9)
    poison(trainer, {2, 3, 4, 5, 6})
    klinic.attach(
        trainer, tmp_path / "run", recovery=klinic.Recovery(max_consecutive=3), console=quiet()
    )
    with pytest.raises(RunStoppedError, match="too many in a row"):
        trainer.train()
    assert trainer.state.global_step == 4


def test_a_kl_beyond_its_limit_stops_the_run(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, learning_rate=0.05, max_steps=20)
    klinic.attach(
        trainer,
        tmp_path / "run",
        monitor_kl_every=1,
        recovery=klinic.Recovery(kl_limit=0.5),
        console=quiet(),
    )
    with pytest.raises(RunStoppedError, match=r"KL .* nats per token, limit 0\.5"):
        trainer.train()
    assert 1 < trainer.state.global_step < 20


def test_a_controller_gets_the_kl_of_a_generation_once(start, tmp_path):
    """Further updates on the same completions measure the KL before the first of them again."""
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, max_steps=9, num_iterations=4)
    term = klinic.KL(coef=0.01, controller="dual_ascent", target=1e-9)
    klinic.attach(trainer, tmp_path / "run", kl=term, doctor="none", console=quiet())
    trainer.train()
    records = [store.read_record(tmp_path / "run", step) for step in range(1, 10)]
    measured = [mean_k1(record) for record in records]
    assert measured[:4] == [0.0] * 4
    assert measured[4] != 0
    assert measured[4:8] == [measured[4]] * 4
    coefs = [record.facts["kl_coef"] for record in records]
    changed = [step for step in range(1, 9) if coefs[step] != coefs[step - 1]]
    assert changed == [5]  # by the first update on the second generation
