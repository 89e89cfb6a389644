"""`klinic demo`: GRPO with a KL on this CPU in minutes, healthy or with an injected fault."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.diagnose import print_cause, print_proof, proof_of
from klinic.cli.extras import is_missing, require
from klinic.cli.printing import Json, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.doctor.diagnosis import Diagnosis
    from klinic.faults import Fault
    from klinic.loop.train import Result
    from klinic.probe.proof import Proof

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
List = Annotated[bool, typer.Option("--list", help="List the available faults.")]
Out = Annotated[
    Path | None,
    typer.Option(help="A new run folder.", show_default="runs/demo, demo-2, ..."),
]


def demo(
    overrides: Overrides = None,
    fault: FaultName = None,
    every: List = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Train a tiny model on sums, or inject a fault and diagnose it; no GPU, no download."""
    if every:
        _list(json=json)
        return
    _refuse_unknown(fault)
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    console = Console(stderr=json, highlight=False)
    with console.status("Loading torch ..."):
        from klinic.lab.demo.run import demo_recipe, find_fault, refuse_used, train_demo
        from klinic.recipe.loading import flags_to_overrides
    if out is not None:
        refuse_used(out)
    broken = None if fault is None else find_fault(fault)
    recipe = demo_recipe(broken, out, flags_to_overrides(overrides or []))
    _introduce(broken, console)
    try:
        result = train_demo(recipe, broken, console)
    except KeyboardInterrupt:
        say(console, "Stopped.")
        raise typer.Exit(130) from None
    if result.signal is not None:
        say(console, f"Stopped after step {result.step}. {_report(result.folder)} shows it so far.")
        raise typer.Exit(128 + result.signal)
    if broken is None:
        _end_well(result, console, json=json)
    else:
        _end_sick(result, broken, console, json=json)


def _refuse_unknown(fault: str | None) -> None:
    from klinic.lab.demo.shown import SHOWN
    from klinic.tasks.base import choose

    if fault is not None:
        choose("fault", fault, SHOWN)


def _list(*, json: bool) -> None:
    from klinic.lab.demo.shown import LEFT_OUT, SHOWN

    if json:
        faults = [{"name": name, "broken": said} for name, said in SHOWN.items()]
        print_json("demo", ok=True, faults=faults, left_out=dict(LEFT_OUT))
        return
    for name, said in SHOWN.items():
        typer.echo(f"{name}: {said}")
    typer.echo("\nklinic demo --fault NAME runs one of them; klinic explain NAME describes it.")


def _introduce(fault: "Fault | None", console: "Console") -> None:
    # at most 80 characters per line: a terminal would break words
    if fault is None:
        say(console, "A model of 0.8M weights is pretrained on sums with frequent carry errors")
        say(console, "(17+8=15). GRPO then rewards correct digits; a KL ties it to its start.")
    else:
        say(console, "A model of 0.8M weights learns sums, with GRPO and a KL.")
        say(console, f"Injected fault: {fault.cause}\n  {fault.mechanism}")
    say(console)


def _end_well(result: "Result", console: "Console", *, json: bool) -> None:
    from klinic.checks import CHECKS
    from klinic.lab.demo.run import last_kl

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
    say(console)
    say(
        console,
        f"Correct answers on held-out sums: {before:.0%} before, {after:.0%} after.",
    )
    if kl is not None:
        say(console, f"KL to the starting model: {kl:.3f} nats per token.")
    _next(
        console,
        (_report(result.folder), "curves, and the KL of every token"),
        (f"klinic diagnose {result.folder}", f"test {len(CHECKS)} possible causes"),
        ("klinic demo --fault stale-sampler", "the same with a fault; --list for all"),
        ("klinic train recipes/arithmetic.yaml", "a recipe to build on"),
    )


def _end_sick(result: "Result", fault: "Fault", console: "Console", *, json: bool) -> None:
    from rich.console import Console

    from klinic.report.reading import read_story

    with Console(stderr=True).status("Reading the records ..."):
        story = read_story(result.folder)
    found = story.diagnosis
    proof = proof_of(result.folder, found, run_code=True)  # this process just made the run
    page = None
    if not is_missing("matplotlib"):
        from klinic.cli.report import write

        page = write([story], result.folder / "report.html")
    is_right = found.cause == fault.cause
    if json:
        told: dict[str, Any] = {
            "fault": fault.cause,
            "folder": str(result.folder),
            **found.to_json(),
            "proof": None if proof is None else asdict(proof),
            "report": None if page is None else str(page),
        }
        print_json("demo", ok=is_right, **told)
    else:
        _print_sick(found, proof, console)
        if page is not None:
            say(console, f"\nHTML report: {page}")
        _next_to_sick(result.folder, found, console, has_page=page is not None)
    raise typer.Exit(0 if is_right else 1)


def _print_sick(found: "Diagnosis", proof: "Proof | None", console: "Console") -> None:
    from klinic.doctor.diagnosis import Status

    say(console)
    print_cause(found, console)
    ruled_out = len(found.of(Status.RULED_OUT))
    say(console, f"Ruled out: {ruled_out} of {len(found.hypotheses)} causes")
    print_proof(found, proof, console)


def _next_to_sick(folder: Path, found: "Diagnosis", console: "Console", *, has_page: bool) -> None:
    named = "" if found.cause is None else f" {found.cause}"
    report = [] if has_page else [(_report(folder), "gaps, and the KL of every token")]
    _next(
        console,
        (f"klinic diagnose {folder}", "every cause, with measurements"),
        (f"klinic explain{named}", "the check and its fix"),
        *report,
        ("klinic demo --list", "other faults"),
    )


def _report(folder: Path) -> str:
    """Return the report command that works with the installed packages."""
    return f"klinic report {folder}" + (" --terminal" if is_missing("matplotlib") else "")


def _next(console: "Console", *commands: tuple[str, str]) -> None:
    width = max(len(command) for command, _ in commands)
    say(console, "\nNext:")
    for command, why in commands:
        say(console, f"  {command:<{width}}  {why}")
