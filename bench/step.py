"""What a step of klinic costs beside a bare one and one of TRL, without and with a KL."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from bench.harness import Claim, measure
from bench.in_step_timing import STEPS, Inside, share
from bench.models import SIZES, saved_model
from bench.steps import Arm, Bare, Klinic, Sizes, Trl

KL_COEF = 0.04
PROMPTS = {"1M": 4, "10M": 2, "124M": 1}
TOKENS = {"1M": 32, "10M": 32, "124M": 16}
"""So that a step of the largest takes seconds."""
SHORT = {"prompts": 1, "completion_length": 16}
"""Beside the bare step, whose margin is small: the shorter the steps, the less the machine changes
between them. What klinic adds to each weighs the more."""
PAST = 17
"""Steps before the first that counts. The doctor asks after 1, 2, 4, 8, ... and where a check fails
that had not; weights that are random give it reason to, in the first steps that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The model of a measurement, and where its runs may write."""

    model: Path
    sizes: Sizes
    folder: Path

    def klinic(self, name: str, kl_coef: float | None, **settings: Any) -> Klinic:
        """Return klinic's step; it has its recovery, its records and its doctor."""
        return Klinic(self.model, self.sizes, kl_coef, self.folder / name, **settings)


@contextlib.contextmanager
def opened(size: str, **sizes: int) -> Iterator[Bench]:
    """Make a model, and forget it afterwards; its steps are as usual where nothing else is said."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        usual = {"prompts": PROMPTS[size], "completion_length": TOKENS[size]}
        yield Bench(
            model=saved_model(size, folder / "model"),
            sizes=Sizes(vocabulary=SIZES[size]["vocab_size"], **{**usual, **sizes}),
            folder=folder,
        )


def step(size: str, **how: Any) -> dict[str, Any]:
    """Compare the steps of one size, without a KL and with one."""
    found: dict[str, Any] = {"ratios": {}, "raw": {}}
    for kl_coef in (0.0, KL_COEF):
        kl = "kl" if kl_coef else "no kl"
        name = f"step {size}, {kl}: klinic / "
        bare = Claim(name=f"{name}bare", arm="klinic", over="bare", must=1.03)
        trl = Claim(name=f"{name}TRL", arm="klinic", over="trl", must=1.0, side="below")
        with opened(size, **SHORT) as bench:
            by_hand = Bare(bench.model, bench.sizes, kl_coef)
            against_bare = _klinic_over(by_hand, bench, kl_coef, bare, **how)
        with opened(size) as bench:
            theirs = Trl(bench.model, bench.sizes, kl_coef, bench.folder / "trl")
            against_trl = _klinic_over(theirs, bench, kl_coef, trl, **how)
        found["ratios"] |= against_bare.pop("ratios") | against_trl.pop("ratios")
        found["raw"] |= {f"{kl}, bare": against_bare, f"{kl}, trl": against_trl}
    return found


def _klinic_over(of: Arm, bench: Bench, kl_coef: float, claim: Claim, **how: Any) -> dict[str, Any]:
    ours = bench.klinic("klinic", kl_coef or None)
    _get_past(ours)
    measured = measure({claim.over: of, claim.arm: ours}, [claim], **how)
    ours.close()
    return measured


def kl_cost(size: str, **how: Any) -> dict[str, Any]:
    """Compare klinic's step with a KL and without, and one that only looks every tenth step."""
    with opened(size) as bench:
        runs = {
            "without": bench.klinic("without", None),
            "with": bench.klinic("with", KL_COEF),
        }
        claims = [Claim(name=f"KL {size}: with / without", arm="with", over="without", must=1.25)]
        _get_past(*runs.values())
        measured = measure(runs, claims, **how)
        looking = bench.klinic("looking", 0.0, **{"kl.monitor_every": 10})
        _get_past(looking)
        blocks = {"without": _ten(runs["without"]), "looking": _ten(looking)}
        name = f"KL {size}: looking every 10 steps / without"
        claims = [Claim(name=name, arm="looking", over="without", must=1.05)]
        looked = measure(blocks, claims, **how)
        ratios = measured.pop("ratios") | looked.pop("ratios")
        raw = {"with": measured, "looking": looked}
        for what, must, step, rounds in (
            ("with, timed inside the step", 1.25, runs["with"], STEPS),
            ("looking every 10 steps, timed inside", 1.05, blocks["looking"], 12),
        ):
            with timed_reference() as clock:
                within, raw[what] = share(step, clock, looking.thread, must=must, rounds=rounds)
            ratios[f"KL {size}: {what}"] = within
        for run in (*runs.values(), looking):
            run.close()
    return {"ratios": ratios, "raw": raw}


@contextlib.contextmanager
def timed_reference() -> Iterator[Inside]:
    """Let a clock run while the reference is at work, and the policy that is compared with it."""
    from klinic.model.reference import Reference
    from klinic.model.scorer import TokenScorer

    clock = Inside()
    asked = [(Reference, name) for name in ("hidden", "logp", "_logits", "now")]
    with clock.adding(*asked, (TokenScorer, "_looked")):
        yield clock


def evidence(size: str, **how: Any) -> dict[str, Any]:
    """Compare klinic's step with records and live checks, and without them."""
    off = {"output.doctor": "none", "output.records_every": 0}
    with opened(size) as bench:
        arms = {
            "off": bench.klinic("off", KL_COEF, **off),
            "on": bench.klinic("on", KL_COEF),
        }
        _get_past(*arms.values())
        claims = [Claim(name=f"evidence {size}: on / off", arm="on", over="off", must=1.01)]
        measured = measure(arms, claims, **how)
        arms["on"].time_evidence(clock := Inside())
        within, seconds = share(arms["on"], clock, arms["on"].thread, must=1.01)
        for run in arms.values():
            run.close()
    ratios = measured.pop("ratios") | {f"evidence {size}: timed inside the step": within}
    return {"ratios": ratios, "raw": {"on": measured, "inside": seconds}}


def attach(size: str, **how: Any) -> dict[str, Any]:
    """Compare TRL's step with klinic attached, as it is by default, and without."""
    with opened(size) as bench:
        arms = {
            "trl": Trl(bench.model, bench.sizes, 0.0, bench.folder / "trl"),
            "attached": Trl(bench.model, bench.sizes, 0.0, bench.folder / "attached", attached={}),
        }
        _get_past(*arms.values())
        name = f"attach {size}: TRL with klinic / without"
        claims = [Claim(name=name, arm="attached", over="trl", must=1.01)]
        measured = measure(arms, claims, **how)
    ratios, raw = measured.pop("ratios"), {"attached": measured}
    for what, must, given in (
        ("timed inside the step", 1.01, {}),
        ("watching the KL at every step, timed inside", None, {"monitor_kl_every": 1}),
    ):
        with opened(size) as bench, timed_hooks() as clock:
            timed = Trl(bench.model, bench.sizes, 0.0, bench.folder / "timed", attached=given)
            _get_past(timed)
            within, raw[what] = share(timed, clock, timed.thread, must=must)
            ratios[f"attach {size}: {what}"] = within
    return {"ratios": ratios, "raw": raw}


@contextlib.contextmanager
def timed_hooks(*, has_processor_time: bool = False) -> Iterator[Inside]:
    """Let a clock run while klinic is at work in a step of TRL."""
    from klinic.integrations.trl import sampled_logprobs
    from klinic.integrations.trl.hooks import MethodWrappers
    from klinic.integrations.trl.session import _StepCallback

    clock, wrap = Inside(has_processor_time=has_processor_time), MethodWrappers.wrap_method

    def timed(self: MethodWrappers, owner: Any, name: str, change: Any) -> Any:
        def apart(real: Any, *args: Any, **kwargs: Any) -> Any:
            return change(clock.there_before(real), *args, **kwargs)

        real = wrap(self, owner, name, clock.added(apart))
        # klinic calls the loss in TRL's stead, and other methods for questions of its own
        return clock.there_before(real) if name == "_compute_loss" else real

    ends = [
        (_StepCallback, f"on_{when}")
        for when in ("pre_optimizer_step", "optimizer_step", "step_end")
    ]
    overheard = sampled_logprobs.RecordedScores
    told = staticmethod(clock.added(overheard.__torch_function__))
    with (
        clock.adding(*ends, (sampled_logprobs.LogitsRecorder, "record_scores")),
        patch.object(overheard, "__torch_function__", told),
        patch.object(
            sampled_logprobs,
            "_call_on_plain_tensors",
            clock.there_before(sampled_logprobs._call_on_plain_tensors),
        ),
        patch.object(MethodWrappers, "wrap_method", timed),
    ):
        yield clock


def _get_past(*arms: Arm) -> None:
    """Make as many steps as it takes for questions to be rare."""
    for arm in arms:
        for _ in range(PAST):
            arm()


def _ten(run: Klinic) -> Arm:
    def ten() -> None:
        for _ in range(10):
            run()

    return ten
