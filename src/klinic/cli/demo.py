"""`klinic demo`: GRPO with a KL on this CPU in minutes, healthy or faulty, live or recorded."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.plain_text import echo_text
from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.proof import ProofAttempt, attempt_proof
from klinic.cli.text_layout import print_commands, print_text
from klinic.cli.train import report_command
from klinic.errors import ConfigError
from klinic.runtime.import_speed import pause_collection

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.doctor.diagnosis import Diagnosis
    from klinic.faults import Fault
    from klinic.training.result import Result

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE ...]",
        help="Recipe keys to override, such as seed=2, kl=null or loop.max_steps=200.",
        show_default=False,
    ),
]
FaultName = Annotated[
    str | None,
    typer.Option(
        "--fault", metavar="NAME", help="Inject this fault, diagnose, prove.", show_default=False
    ),
]
Recorded = Annotated[
    bool,
    typer.Option("--recorded", help="Diagnose a recorded run of TRL with a bug; needs no torch."),
]
List = Annotated[bool, typer.Option("--list", help="List the available faults.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="A new run folder.", show_default="runs/demo, demo-2, ..."),
]


def demo(
    overrides: Overrides = None,
    fault: FaultName = None,
    recorded: Recorded = False,
    every: List = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Train a tiny model on sums, or inject a fault and diagnose it; no GPU, no download."""
    if every:
        _list_faults(json=json)
    elif recorded:
        _refuse_training(overrides, fault)
        _diagnose_recorded(out, json=json)
    else:
        _refuse_unknown(fault)
        _train(overrides or [], fault, out, json=json)


def _train(overrides: list[str], fault: str | None, out: Path | None, *, json: bool) -> None:
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    console = Console(stderr=json, highlight=False)
    with console.status("Loading torch ..."), pause_collection():
        from klinic.lab.demo.out_folder import check_empty
        from klinic.lab.demo.run import demo_recipe, find_fault, train_demo
        from klinic.recipe.loading import flags_to_overrides
    if out is not None:
        check_empty(out)
    broken = None if fault is None else find_fault(fault)
    recipe = demo_recipe(broken, out, flags_to_overrides(overrides))
    _print_introduction(broken, console)
    try:
        result = train_demo(recipe, broken, console)
    except KeyboardInterrupt:
        print_line(console, "Stopped.")
        raise typer.Exit(130) from None
    if result.signal is not None:
        print_line(
            console,
            f"Stopped after step {result.step}. {report_command(result.folder)} shows it so far.",
        )
        raise typer.Exit(128 + result.signal)
    if broken is None:
        _finish_healthy(result, console, json=json)
    else:
        _finish_faulty(result, broken, console, json=json)


def _refuse_unknown(fault: str | None) -> None:
    from klinic.lab.demo.shown import DEMO_FAULTS
    from klinic.tasks.base import look_up

    if fault is not None:
        look_up("fault", fault, DEMO_FAULTS)


def _list_faults(*, json: bool) -> None:
    from klinic.lab.demo.shown import DEMO_FAULTS, EXCLUDED

    if json:
        faults = [
            {"name": name, "broken": description} for name, description in DEMO_FAULTS.items()
        ]
        print_json("demo", ok=True, faults=faults, left_out=dict(EXCLUDED))
        return
    for name, description in DEMO_FAULTS.items():
        echo_text(f"{name}: {description}", hang=4)
    echo_text("\nklinic demo --fault NAME runs one of them; klinic explain NAME describes it.")


def _refuse_training(overrides: list[str] | None, fault: str | None) -> None:
    if overrides or fault is not None:
        words = [*(overrides or []), *([] if fault is None else [f"--fault {fault}"])]
        raise ConfigError(
            f"--recorded is given with {', '.join(words)}, but it trains nothing: it shows a run "
            "as it was recorded. Omit --recorded to train a run with these settings."
        )


def _diagnose_recorded(out: Path | None, *, json: bool) -> None:
    from rich.console import Console

    from klinic.cli.diagnose import diagnose_records
    from klinic.cli.diagnosis_view import print_cause
    from klinic.lab.demo.recorded import BUG, CAUSE, copy_recorded_run, curve_table

    console = Console(stderr=json, highlight=False)
    run = copy_recorded_run(out)
    diagnosis = diagnose_records(run, no_cache=False)
    is_right = diagnosis.cause == CAUSE
    if json:
        print_json("demo", ok=is_right, fault=CAUSE, folder=str(run), **diagnosis.to_json())
    else:
        print_line(console, "A recorded run of TRL's GRPOTrainer: 16 steps, sums of two numbers.")
        print_line(console, "Its curves show that something is wrong, but not the cause:\n")
        console.print(curve_table(run))
        print_line(console)
        print_cause(diagnosis, console)
        print_line(console, f"\nThe bug in the script: {BUG}")
        print_commands(
            console,
            (f"klinic diagnose {run}", "every cause, with measurements"),
            (f"klinic report {run} --terminal", "log-prob gaps, and the KL of every token"),
            (f"klinic explain {CAUSE}", "the check and its fix"),
        )
    raise typer.Exit(0 if is_right else 1)


def _print_introduction(fault: "Fault | None", console: "Console") -> None:
    # at most 80 characters per line: a terminal would break words
    if fault is None:
        print_line(
            console, "A model of 0.8M weights is pretrained on sums with frequent carry errors"
        )
        print_line(
            console, "(17+8=15). GRPO then rewards correct digits; a KL ties it to its start."
        )
    else:
        print_line(console, "A model of 0.8M weights learns sums, with GRPO and a KL.")
        print_line(console, f"Injected fault: {fault.cause}")
        print_text(console, fault.mechanism, indent=(2, 2))
    print_line(console)


def _finish_healthy(result: "Result", console: "Console", *, json: bool) -> None:
    from klinic.checks import CHECKS
    from klinic.lab.demo.run import NUM_AVERAGED, last_kl

    name = "eval/accuracy"
    before, after, kl = result.before[name], result.after[name], last_kl(result.folder)
    if json:
        print_json(
            "demo",
            ok=True,
            folder=str(result.folder),
            step=result.step,
            accuracy_before=before,
            accuracy_after=after,
            kl=kl,
        )
        return
    print_line(console)
    print_line(
        console,
        f"Correct answers on held-out sums: {before:.0%} before, {after:.0%} after.",
    )
    if kl is not None:
        print_line(
            console,
            f"KL to the starting model: {kl:.3f} nats per token, mean of the last "
            f"{NUM_AVERAGED} steps.",
        )
    print_commands(
        console,
        (report_command(result.folder), "curves, and the KL of every token"),
        (f"klinic diagnose {result.folder}", f"test {len(CHECKS)} possible causes"),
        ("klinic demo --fault stale-sampler", "the same with a fault; --list for all"),
        ("klinic train recipes/arithmetic.yaml", "a recipe to build on"),
    )


def _finish_faulty(result: "Result", fault: "Fault", console: "Console", *, json: bool) -> None:
    from rich.console import Console

    from klinic.cli.report import write_page
    from klinic.report.reading import read_run_report
    from klinic.report.recorded_proof import read_proof

    with Console(stderr=True).status("Reading the records ..."):
        story = read_run_report(result.folder)
    diagnosis = story.diagnosis
    assert diagnosis is not None  # noqa: S101 - the run has records
    # this process just made the run
    attempt = attempt_proof(result.folder, diagnosis, run_code=True)
    story = replace(story, proof=read_proof(result.folder, diagnosis.cause))
    page = write_page([story], result.folder / "report.html")
    is_right = diagnosis.cause == fault.cause
    if json:
        fields: dict[str, Any] = {
            "fault": fault.cause,
            "folder": str(result.folder),
            **diagnosis.to_json(),
            **attempt.to_json(),
            "report": str(page),
        }
        print_json("demo", ok=is_right, **fields)
    else:
        _print_diagnosis(diagnosis, attempt, console)
        print_line(console, f"\nHTML report: {page}")
        _print_faulty_next(result.folder, diagnosis, console)
    raise typer.Exit(0 if is_right else 1)


def _print_diagnosis(diagnosis: "Diagnosis", attempt: ProofAttempt, console: "Console") -> None:
    from klinic.cli.diagnosis_view import print_cause, print_others, print_proof

    print_line(console)
    print_cause(diagnosis, console)
    print_proof(attempt, console)
    print_others(diagnosis, console)


def _print_faulty_next(folder: Path, diagnosis: "Diagnosis", console: "Console") -> None:
    named = "" if diagnosis.cause is None else f" {diagnosis.cause}"
    print_commands(
        console,
        (f"klinic diagnose {folder}", "every cause, with measurements"),
        (f"klinic explain{named}", "the check and its fix"),
        ("klinic demo --list", "other faults"),
    )
