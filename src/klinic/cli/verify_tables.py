"""Tables of `klinic verify`."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from klinic.verify.advice import Judgement
from klinic.verify.estimators import EstimatorRow
from klinic.verify.function import FunctionMeasurement
from klinic.verify.monte_carlo import DistanceEstimates
from klinic.verify.proof import Proof

SHOWN_CORRECTIONS = ("policy", "unbiased", "sequence")  # exact and topk are close to unbiased
WIDE = 80  # columns of a terminal that the widest table needs
COLOURS = {"correct": "green", "conditional": "yellow", "wrong": "red"}


def print_proof(proof: Proof, console: Console) -> None:
    """Print all estimators, the identities, and the effect of averages and advantages."""
    for table in _estimator_tables(proof, console.width):
        console.print(table)
    console.print(
        "gradient: which exact sum the expected gradient equals. value: its mean against the KL. "
        "bias, var.: of the gradient, where that of KL(policy || reference) between completions "
        "is 1, median of random worlds (ranges below). off policy: on "
        "completions of an older policy, verdict and bias; correct there means the token-level "
        "gradient at the prefixes the older policy visits.\n",
        style="dim",
    )
    for row in proof.rows:
        console.print(f"[bold]{row.name}[/]  {escape(row.sentence)}{_extremes_text(row)}")
    console.print()
    console.print(_range_table(proof))
    console.print(
        "Median of 48 policies of four families (exceeded, or below it for the cosine, in 5% of "
        "them). Token-level terms leave out the "
        "effect of a token on later ones: where that dominates, they point away from the gradient "
        "of the KL between completions. `sequence` includes it.\n",
        style="dim",
    )
    console.print(_cap_table(proof))
    console.print(_correction_table(proof))
    console.print(
        "Bias of the expected gradient on completions of an older policy, where the gradient on "
        "completions of the policy is 1, with weights capped at 2; last column without a cap. "
        "Token weights leave the sampler's prefixes; sequence weights correct these too, but their "
        "variance grows with length, and these completions have 3 tokens. "
        "`learner.importance_sampling` sets the mode.\n",
        style="dim",
    )
    console.print(_average_table(proof))
    console.print(_advantage_table(proof))
    console.print(
        "constant: only scales. The means depend on how long the completions came out, so they "
        "also reward changing that. Groups of 8, a verifier's rewards of 0 and 1.\n",
        style="dim",
    )
    _print_checks(proof, console)


def print_distances(section: str, distances: list[DistanceEstimates], console: Console) -> None:
    """Print Monte Carlo averages against the exact KL."""
    table = _new_table(f"k3 and its reversed form: {section}")
    for column in ("exact KL", "estimator", "Monte Carlo", "exact mean", "error", ""):
        table.add_column(column, justify="left" if column in {"estimator", ""} else "right")
    for distance in distances:
        for index, estimate in enumerate(distance.estimates):
            table.add_row(
                f"{distance.kl:.4f}" if index == 0 else "",
                estimate.name,
                f"{estimate.monte_carlo:.4f}",
                f"{estimate.expected:.4f}",
                f"{estimate.error:.4f}",
                "[green]the KL[/]" if estimate.right else _wrong_target(estimate.name),
            )
        table.add_section()
    console.print(table)
    console.print(
        "k3 = exp(ref - policy) - (ref - policy) - 1 estimates KL(policy || reference) on tokens "
        "of the policy. The reversed form is off by chi-square minus twice the KL. As a loss k3 is "
        "another matter: see `klinic verify`.",
        style="dim",
    )


def print_judgement(measured: FunctionMeasurement, judgement: Judgement, console: Console) -> None:
    """Print the verdict on a user's function and its explanation."""
    colour = COLOURS[judgement.verdict]
    console.print(f"[bold]{escape(measured.name)}[/]: [{colour}]{judgement.verdict}[/] as a loss")
    console.print(escape(judgement.advice))
    meaning = {"logp": "policy", "logp_ref": "reference", "logp_old": "sampler"}
    meaning |= {"logits": "policy", "logits_ref": "reference", "tokens": "token ids"}
    meaning |= {"mask": "true for tokens that count", "padding_mask": "true for padding"}
    read = ", ".join(f"{name} = {meaning[role]}" for name, role in measured.roles.items())
    console.print(f"(read as: {escape(read)})", style="dim")


def _estimator_tables(proof: Proof, width: int) -> list[Table]:
    """Return one table, or two of some columns each for a narrow terminal."""
    halves = (("gradient", "value"), ("off policy", "bias", "var."))
    parts = halves if width < WIDE else (("gradient", "off policy", "value", "bias", "var."),)
    return [_estimator_table(proof, part) for part in parts]


def _estimator_table(proof: Proof, columns: Sequence[str]) -> Table:
    table = _new_table("What each KL term differentiates, by enumeration")
    table.add_column("estimator", no_wrap=True)
    for column in columns:
        is_text = column in {"gradient", "off policy"}
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    kind = None
    for row in proof.rows:
        if kind is not None and row.kind != kind:
            table.add_section()
        kind = row.kind
        off_policy = _colour_text(row.verdict_off_policy, row.verdict_off_policy)
        cells = {
            "gradient": _colour_text(row.identity, row.verdict),
            "off policy": f"{off_policy} {row.bias_off_policy:.2f}",
            "value": f"{row.value_bias:+.0%}" if abs(row.value_bias) > 1e-9 else "KL",
            "bias": _number_text(row.over_worlds.bias.median),
            "var.": f"{row.over_worlds.variance.median:.1f}",
        }
        name = row.name if row.ok else f"[red]{row.name} FAILS[/]"
        table.add_row(name, *(cells[column] for column in columns))
    return table


def _range_table(proof: Proof) -> Table:
    table = _new_table("Against the gradient of the KL between completions, over random worlds")
    table.add_column("estimator", no_wrap=True)
    for column in ("bias", "cosine", "points away", "var."):
        table.add_column(column, justify="right")
    for row in proof.rows:
        bias, cosine = row.over_worlds.bias, row.over_worlds.cosine
        variance = row.over_worlds.variance
        table.add_row(
            row.name,
            f"{_number_text(bias.median)} ({_number_text(bias.high)})",
            f"{_number_text(cosine.median)} ({_number_text(cosine.low)})",
            f"{row.over_worlds.opposed:.0%}",
            f"{variance.median:.1f} ({variance.high:.1f})",
        )
    return table


def _number_text(value: float) -> str:
    return f"{value:.2f}" if abs(value) > 1e-9 else "0"


def _cap_table(proof: Proof) -> Table:
    table = _new_table("What holding the importance weight at 2 changes, by drift of the sampler")
    table.add_column("mean |log ratio|")
    for drift in proof.rows[0].cap_bias_by_drift if proof.rows else ():
        table.add_column(f"{drift.mean_log_ratio:.2f}", justify="right")
    for row in proof.rows:
        if row.cap_bias:
            table.add_row(row.name, *(f"{entry.bias:.1%}" for entry in row.cap_bias_by_drift))
    return table


def _correction_table(proof: Proof) -> Table:
    table = _new_table("Importance weights by mode, by drift of the sampler")
    table.add_column("mean |log ratio|")
    for drift in proof.correction[0].by_drift if proof.correction else ():
        table.add_column(f"{drift.mean_log_ratio:.2f}", justify="right")
    table.add_column("no cap", justify="right")
    for row in (row for row in proof.correction if row.term in SHOWN_CORRECTIONS):
        if row.term == "policy" and row.mode != "none":
            table.add_section()
        biases = (_number_text(entry.bias) for entry in row.by_drift)
        table.add_row(f"{row.mode}, {row.term}", *biases, _number_text(row.uncapped_bias))
    return table


def _new_table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))


def _extremes_text(row: EstimatorRow) -> str:
    if row.extremes is None:
        return ""
    notes = []
    if row.extremes.overflows_at:
        notes.append(f"overflows in float32 for {row.extremes.overflows_at}")
    if row.extremes.saturates_at:
        notes.append(f"no pull for {row.extremes.saturates_at}")
    if row.extremes.cancels_at:
        notes.append(f"cancels for {row.extremes.cancels_at}")
    return f" [yellow]({'; '.join(notes)})[/]" if notes else ""


def _average_table(proof: Proof) -> Table:
    table = _new_table("What an average leaves of the gradient")
    for column in ("estimator", "average"):
        table.add_column(column)
    for column in ("times", "not explained"):
        table.add_column(column, justify="right")
    for row in proof.aggregation:
        if row.scale is None or row.deviation is None:
            table.add_row(row.estimator, row.aggregation, "refused", "")
        else:
            exact = row.deviation < 1e-9
            table.add_row(
                row.estimator,
                row.aggregation,
                f"{row.scale:.3f}",
                "[green]0[/]" if exact else f"[yellow]{row.deviation:.1%}[/]",
            )
    return table


def _advantage_table(proof: Proof) -> Table:
    table = _new_table("What a coefficient of 1 weighs against the reward")
    table.add_column("advantage")
    rates = sorted({row.success_rate for row in proof.advantage})
    for rate in rates:
        table.add_column(f"at {rate:.0%} right", justify="right")
    for name in dict.fromkeys(row.advantage for row in proof.advantage):
        weights = {r.success_rate: r.coefficient for r in proof.advantage if r.advantage == name}
        table.add_row(name, *(f"{weights[rate]:.2f}" for rate in rates))
    return table


def _print_checks(proof: Proof, console: Console) -> None:
    failed = [check for check in proof.checks if not check.ok]
    for check in failed:
        console.print(f"[red]FAILS[/] {check.statement}: error {check.error:.1e}")
    num_holding = len(proof.checks) - len(failed)
    colour = "red" if failed else "green"
    console.print(
        f"[{colour}]{num_holding} of {len(proof.checks)} identities hold[/], the worst to "
        f"{proof.worst_identity_error:.0e} (limit 1e-9)."
    )


def _colour_text(text: str, verdict: str) -> str:
    return f"[{COLOURS[verdict]}]{text}[/]"


def _wrong_target(name: str) -> str:
    return "[red]chi2 - KL[/]" if "reversed" in name else "[red]not the KL[/]"
