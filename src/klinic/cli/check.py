"""`klinic check RECIPE`: every part on one batch, before any hour is spent; exit code for CI."""

from typing import TYPE_CHECKING

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json, say
from klinic.cli.train import Overrides, Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.probe.single_batch import Checked


def check(recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:
    """Try every part of a recipe on two small batches, and every test of the first step."""
    from rich.console import Console

    from klinic.recipe.loading import flags_to_overrides, load

    loaded = load(recipe, flags_to_overrides(overrides or []))
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    with Console(stderr=True).status("Loading torch ...") as status:
        from klinic.probe.single_batch import single_batch

        found = single_batch(loaded.recipe, lambda what: status.update(f"{what} ..."))
    if as_json:
        _print_json(found)
    else:
        _print(found, Console(highlight=False))
    raise typer.Exit(0 if found.ok else 1)


def _print_json(found: "Checked") -> None:
    assert found.diagnosis is not None  # noqa: S101 - it ended
    parts = [{"name": p.name, "ok": p.ok, "says": p.says} for p in found.parts]
    shown = [{"prompt": p, "completion": c, "reward": r} for p, c, r in found.shown]
    print_json("check", ok=found.ok, parts=parts, completions=shown, **found.diagnosis.to_json())


def _print(found: "Checked", console: "Console") -> None:
    for part in found.parts:
        say(console, f"{'✓' if part.ok else '✗'} {part.name}: {part.says}")
    say(console)
    for prompt, completion, reward in found.shown:
        say(console, f"  {reward:+.3f}  {prompt!r} -> {completion!r}")
    diagnosis = found.diagnosis
    assert diagnosis is not None  # noqa: S101 - it ended
    decided = [h for h in diagnosis.hypotheses if h.num_judged]
    failed = [h for h in decided if h.num_failed]
    say(console)
    say(console, f"{len(decided)} of {len(diagnosis.hypotheses)} causes could be looked for.")
    for hypothesis in failed:
        summary = "" if hypothesis.finding is None else hypothesis.finding.summary
        say(console, f"✗ {hypothesis.check.name}: {summary}")
    if diagnosis.cause is not None:
        say(console, f"\nCause: {diagnosis.cause}\nFix: {diagnosis.fix}")
    say(console, "\nReady to train." if found.ok else "\nNot ready to train.")
