"""Draw the pictures of the tutorial: `python docs/tutorial/pictures.py`, with `klinic[plot]`."""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from klinic.maths import kl

HERE = Path(__file__).parent
STUDY = HERE.parent / "studies" / "coefficient" / "steps.parquet"
SHOWN = {"kl.coef=0": "no penalty", "kl.coef=0.1": "coefficient 0.1", "kl.coef=1.0": "1.0"}
COLOURS = ("#c2410c", "#0f766e", "#1d4ed8", "#737373")
SMOOTHED = 20  # steps


def estimators() -> None:
    """Draw what a sampled token contributes, and how hard it is pulled, by its log-ratio."""
    import matplotlib.pyplot as plt

    k1 = np.linspace(-3.5, 2.5, 200)
    both = {"logp_p": k1, "logp_q": np.zeros_like(k1)}
    values = {
        "k1": kl.k1(**both),
        "k2": kl.k2(**both),
        "k3": kl.k3(**both),
        "exp(k1) k1": np.exp(k1) * k1,
    }
    pulls = {
        "k1": np.ones_like(k1),
        "k2, unbiased": k1,
        "k3": -np.expm1(-k1),
        "exp(k1) k1": np.exp(k1) * (1 + k1),
    }
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, lines, title in zip(
        axes,
        (values, pulls),
        ("what a token adds to the estimate", "what multiplies grad logp, as a loss"),
        strict=True,
    ):
        for (name, y), colour in zip(lines.items(), COLOURS, strict=True):
            axis.plot(k1, y, label=name, color=colour)
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.set(title=title, xlabel="logp - logp_ref, nats", ylim=(-6, 8))
        axis.legend(frameon=False)
    figure.savefig(HERE / "estimators.png", dpi=90)


def study() -> None:
    """Draw KL and held-out accuracy of the study, the mean and the extremes of five seeds."""
    import matplotlib.pyplot as plt

    table = pq.read_table(STUDY)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for (setting, label), colour in zip(SHOWN.items(), COLOURS, strict=False):
        rows = table.filter(pc.equal(table["setting"], setting))
        for axis, column in zip(axes, ("kl", "eval/accuracy"), strict=True):
            steps, seeds = by_seed(rows, column)
            axis.plot(steps, seeds.mean(axis=0), label=label, color=colour)
            axis.fill_between(
                steps, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
    axes[0].set(title="KL to the reference", xlabel="step", ylabel="nats per token", ylim=(0, 0.35))
    axes[1].set(title="held-out sums that are right", xlabel="step")
    axes[1].legend(frameon=False)
    figure.savefig(HERE / "study.png", dpi=90)


def by_seed(rows: "pq.Table", column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which something was measured, and a smoothed row for each seed."""
    known = rows.filter(pc.is_valid(rows[column]))
    steps = np.unique(known["step"].to_numpy())
    found = [
        known.filter(pc.equal(known["seed"], seed)).sort_by("step")[column].to_numpy()
        for seed in np.unique(known["seed"].to_numpy())
    ]
    width = max(1, SMOOTHED // int(steps[2] - steps[1]))  # steps need not all be measured
    kernel = np.ones(width) / width
    smooth = np.stack([np.convolve(seed, kernel, mode="valid") for seed in found])
    return steps[width - 1 :], smooth


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    estimators()
    study()
