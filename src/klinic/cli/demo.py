"""`klinic demo`: GRPO and its KL on this CPU in a minute or two, well or broken on purpose."""

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
        help="Keys of the recipe to set, such as seed=2, kl=null or loop.max_steps=200.",
        show_default=False,
    ),
]
FaultName = Annotated[
    str | None,
    typer.Option(
        "--fault", metavar="NAME", help="Break it so, then diagnose and prove.", show_default=False
    ),
]
List = Annotated[bool, typer.Option("--list", help="List the faults that can be shown.")]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the run, a new one.", show_default="runs/demo, demo-2, ..."),
]


def demo(
    overrides: Overrides = None,
    fault: FaultName = None,
    every: List = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Watch a tiny model learn sums, or break it and see it diagnosed; no GPU, no download."""
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
    typer.echo("\nklinic demo --fault NAME shows one of them; klinic explain NAME says more.")


def _introduce(fault: "Fault | None", console: "Console") -> None:
    # in lines of eighty characters: a terminal would break words
    if fault is None:
        say(console, "A model of 0.8M weights is taught sums by one who often forgets to carry")
        say(console, "(17+8=15). GRPO then rewards right digits, and a KL ties it to what it was.")
    else:
        say(console, "A model of 0.8M weights begins to learn sums, with GRPO and a KL.")
        say(console, f"Broken on purpose: {fault.cause}\n  {fault.mechanism}")
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
        f"Right answers to sums that it never trained on: {before:.0%} before, {after:.0%} after.",
    )
    if kl is not None:
        say(console, f"That cost a KL of {kl:.3f} nats per token to the model it started from.")
    _next(
        console,
        (_report(result.folder), "curves, and the KL of every token"),
        (f"klinic diagnose {result.folder}", f"is it well? {len(CHECKS)} causes, tested"),
        ("klinic demo --fault stale-sampler", "the same, broken; or --list"),
        ("klinic train recipes/arithmetic.yaml", "a recipe to build on"),
    )


def _end_sick(result: "Result", fault: "Fault", console: "Console", *, json: bool) -> None:
    from rich.console import Console

    from klinic.report.reading import read_story

    with Console(stderr=True).status("Reading the records ..."):
        story = read_story(result.folder)
    found = story.diagnosis
    proof = proof_of(result.folder, found, run_code=True)  # made here, a moment ago
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
            say(console, f"\nReport, for a browser: {page}")
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
        (f"klinic diagnose {folder}", "every cause, and what was measured"),
        (f"klinic explain{named}", "what is looked for, and the fix"),
        *report,
        ("klinic demo --list", "other ways to break it"),
    )


def _report(folder: Path) -> str:
    """Return the command that shows a run, as it works with what is installed."""
    return f"klinic report {folder}" + (" --terminal" if is_missing("matplotlib") else "")


def _next(console: "Console", *commands: tuple[str, str]) -> None:
    width = max(len(command) for command, _ in commands)
    say(console, "\nNext:")
    for command, why in commands:
        say(console, f"  {command:<{width}}  {why}")
