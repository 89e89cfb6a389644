"""`klinic verify`: prove every KL term of klinic, or examine a user's function."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.printing import Json, print_json, require_modules

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from klinic.verify.advice import Judgement
    from klinic.verify.function import FunctionMeasurement
    from klinic.verify.monte_carlo import DistanceEstimates

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[direction | importance-sampling | MODULE:FUNCTION]",
        help="Default: every KL term of klinic. `direction` and `importance-sampling`: k3 by "
        "Monte Carlo against the exact KL. MODULE:FUNCTION or FILE.py:FUNCTION: your own "
        "f(logp, logp_ref) or f(logits, logits_ref), per token or per completion; Class.method "
        "and an nn.Module work as well.",
        show_default=False,
    ),
]


def verify(target: Target = None, json: Json = False) -> None:
    """Prove which KL and gradient each KL term estimates, by exact enumeration."""
    require_modules("train", "torch")
    _use_one_thread()
    if target is None:
        ok = _verify_all(json)
    elif target in {"direction", "importance-sampling"}:
        ok = _verify_monte_carlo(target, json)
    else:
        ok = _verify_function(target, json)
    if not ok:
        raise typer.Exit(1)


def _use_one_thread() -> None:
    """Use one thread: for small tensors a second one costs more than it gains."""
    import torch

    torch.set_num_threads(1)


def _verify_all(json: bool) -> bool:
    from klinic.cli.verify_tables import print_proof
    from klinic.verify.proof import prove

    with _status_line() as status:
        proof = prove(lambda stage: status.update(f"Checking {stage} ..."))
    if json:
        print_json(
            "verify",
            ok=proof.ok,
            rows=proof.rows,
            worst_identity_error=proof.worst_identity_error,
            checks=[asdict(check) | {"ok": check.ok} for check in proof.checks],
            aggregation=proof.aggregation,
            advantage=proof.advantage,
            correction=proof.correction,
        )
    else:
        print_proof(proof, _make_console())
    return proof.ok


def _verify_monte_carlo(section: str, json: bool) -> bool:
    from klinic.cli.verify_tables import print_distances
    from klinic.verify import monte_carlo

    run = (
        monte_carlo.measure_direction
        if section == "direction"
        else monte_carlo.measure_importance_sampling
    )
    with _status_line():
        distances: list[DistanceEstimates] = run()
    ok = monte_carlo.all_as_expected(distances)
    if json:
        print_json(f"verify {section}", ok=ok, rows=distances)
    else:
        print_distances(section, distances, _make_console())
    return ok


def _verify_function(target: str, json: bool) -> bool:
    from klinic.cli.verify_tables import print_judgement
    from klinic.verify.advice import judge
    from klinic.verify.function import measure
    from klinic.verify.loading import load_user_function

    # keep user output out of the tables and the JSON object
    with _status_line(), redirect_stdout(sys.stderr):
        measured = measure(load_user_function(target))
    judgement = judge(measured)
    ok = judgement.verdict != "wrong"
    if json:
        _print_function_json(target, measured, judgement, ok)
    else:
        print_judgement(measured, judgement, _make_console())
    return ok


def _print_function_json(
    target: str, measured: "FunctionMeasurement", judgement: "Judgement", ok: bool
) -> None:
    extremes = measured.extremes
    off_policy, vocabulary = measured.off_policy, measured.vocabulary
    print_json(
        "verify",
        ok=ok,
        function=target,
        arguments=measured.roles,
        value=judgement.value,
        gradient=measured.gradient.gradient,
        gradient_scale=measured.gradient.scale if measured.gradient.target else None,
        gradient_off_policy=None if off_policy is None else off_policy.gradient,
        importance_sampling=None if off_policy is None else off_policy.form,
        ratio_cap=None if off_policy is None else off_policy.ratio_cap,
        ratio_range=None if off_policy is None else off_policy.ratio_range,
        gradient_as_reward=measured.as_reward.gradient,
        saturates_at=None if extremes is None else extremes.saturates_at,
        overflows_at=None if extremes is None else extremes.overflows_at,
        cancels_at=None if extremes is None else extremes.cancels_at,
        imprecise_below=None if extremes is None else extremes.imprecise_below,
        departs_at=None if measured.departure is None else measured.departure.departs_at,
        departure=measured.departure,
        departure_in_float32=measured.departure_in_float32,
        vocabulary=vocabulary,
        failed_checks=measured.failed_checks,
        own_length=measured.own_length,
        verdict=judgement.verdict,
        advice=judgement.advice,
    )


def _status_line() -> "Status":
    """Return a status line on standard error."""
    from rich.console import Console

    return Console(stderr=True).status("Enumerating ...")


def _make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)
