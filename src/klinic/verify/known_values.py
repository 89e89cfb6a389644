"""Names the quantity that the mean value of a function estimates."""

from klinic.verify.identify import TOLERANCE
from klinic.verify.targets import (
    bucketed_top_k_kl,
    forward_kl,
    half_chi_square,
    reverse_kl,
    sum_over_prefixes,
)
from klinic.verify.toy_policies import World

# Quantities that a mean value can equal, each an exact sum, simplest first.
KNOWN_VALUES = {
    "kl": "KL(policy || reference)",
    "forward_kl": "KL(reference || policy)",
    "chi_square_minus_kl": "chi-square(policy || reference) minus the KL",
    "chi_square": "chi-square(policy || reference)",
    "bucket": "the KL of the likeliest tokens and a rest bucket, a lower bound",
    "k2": "half the mean squared log-ratio, near the KL only while both policies are close",
    "abs": "the mean absolute log-ratio, which is not a KL",
    "exp_k1": "the mean of exp(k1) k1, a KL only if the tokens were sampled from the reference",
}


def known_quantities(world: World) -> dict[str, float]:
    """Return every known quantity per completion, as an exact sum."""
    sums = {
        "kl": reverse_kl,
        "forward_kl": forward_kl,
        "chi_square": lambda p, q: 2 * half_chi_square(p, q) - 1,
        "k2": lambda p, q: (p.exp() * (p - q) ** 2 / 2).sum(-1),
        "abs": lambda p, q: (p.exp() * (p - q).abs()).sum(-1),
        "exp_k1": lambda p, q: ((2 * p - q).exp() * (p - q)).sum(-1),
        "bucket": bucketed_top_k_kl,
    }
    values = {name: float(sum_over_prefixes(world, kl)) for name, kl in sums.items()}
    values["chi_square_minus_kl"] = values["chi_square"] - values["kl"]
    return {name: values[name] for name in KNOWN_VALUES}


def identify_value(
    mean_values: list[float], world_quantities: list[dict[str, float]], tolerance: float
) -> tuple[str | None, float]:
    """Return the quantity of which the mean values are one common multiple, or none.

    Any value is a multiple of any quantity in one world, so at least two are needed.
    """
    if len(mean_values) < 2:
        raise ValueError("a mean value is named from two worlds or more, not from one")
    if max(map(abs, mean_values)) < TOLERANCE:
        return "zero", 0.0
    for name in KNOWN_VALUES:
        ratios = [
            value / quantities[name]
            for value, quantities in zip(mean_values, world_quantities, strict=True)
        ]
        if max(ratios) - min(ratios) < tolerance * abs(ratios[0]):
            return name, ratios[0]
    return None, 1.0
