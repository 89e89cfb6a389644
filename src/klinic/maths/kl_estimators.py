"""KL estimators by recipe name, each with its expected gradient.

The name selects an entry of `ESTIMATORS` and also fixes where the term enters the loss. `gradient`
is the expected gradient on policy, for terms summed over tokens, with the cap off. `klinic verify`
proves every entry by enumeration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from jaxtyping import Float

from klinic.errors import ConfigError
from klinic.maths import kl_terms
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.masked import Aggregation


class Gradient(StrEnum):
    """The gradient that a term has in expectation; `kl_terms.py` defines the names."""

    REVERSE_SEQUENCE = "reverse_sequence"
    REVERSE_TOKEN = "reverse_token"  # noqa: S105 - a token of text, not a secret
    REVERSE_TOKEN_OFF_POLICY = "reverse_token_off_policy"  # noqa: S105
    FORWARD_TOKEN = "forward_token"  # noqa: S105
    FORWARD_SEQUENCE = "forward_sequence"
    ZERO = "zero"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A named KL term with its expected gradient."""

    name: str
    kind: Literal["offered", "published"]
    gradient: Gradient
    sentence: str
    """One-sentence description for users."""
    term: Callable[[KLInputs], Any]

    @property
    def needs_whole_row(self) -> bool:
        """Whether the term of a token depends on other tokens of its row."""
        return self.name in ("sequence", "k1_reward", "exp_k1_reward")


def _offered_estimator(name: str, gradient: Gradient, term: Any, sentence: str) -> Estimator:
    return Estimator(name=name, kind="offered", gradient=gradient, term=term, sentence=sentence)


def _published_estimator(name: str, gradient: Gradient, term: Any, sentence: str) -> Estimator:
    return Estimator(name=name, kind="published", gradient=gradient, term=term, sentence=sentence)


_ALL_ESTIMATORS = (
    _offered_estimator(
        "unbiased",
        Gradient.REVERSE_TOKEN,
        kl_terms.unbiased,
        "The token-level gradient of KL(policy || reference), with linear tails: nothing "
        "overflows, and on policy every token has a gradient.",
    ),
    _offered_estimator(
        "exact",
        Gradient.REVERSE_TOKEN,
        kl_terms.exact,
        "The same gradient as `unbiased` with the action summed out: far less noise, but it needs "
        "the reference's whole vocabulary.",
    ),
    _offered_estimator(
        "topk",
        Gradient.OTHER,
        kl_terms.topk,
        "The exact gradient of a lower bound of the token-level KL; it vanishes at the reference.",
    ),
    _offered_estimator(
        "sequence",
        Gradient.REVERSE_SEQUENCE,
        kl_terms.sequence,
        "The whole gradient of the KL between completions, future terms included; biased off "
        "policy, and rejected with sequence_mean.",
    ),
    _published_estimator(
        "k1",
        Gradient.ZERO,
        kl_terms.k1,
        "Summed over tokens, the expected gradient is zero: only noise on policy. Averaged over "
        "each completion's own length, it lengthens completions; off policy it pushes away from "
        "the sampled tokens.",
    ),
    _published_estimator(
        "k2",
        Gradient.REVERSE_TOKEN,
        kl_terms.k2,
        "The token-level gradient of KL(policy || reference), on policy; its value is not a KL.",
    ),
    _published_estimator(
        "k3",
        Gradient.FORWARD_TOKEN,
        kl_terms.k3,
        "On policy and unclamped, the value is KL(policy || reference), the gradient, token by "
        "token, that of KL(reference || policy), with weights that grow like exp(d).",
    ),
    _published_estimator(
        "k3_plus",
        Gradient.REVERSE_TOKEN,
        kl_terms.k3_plus,
        "The value of k3 with the gradient of k2: the token-level gradient, on policy.",
    ),
    _published_estimator(
        "k3_ratio",
        Gradient.REVERSE_TOKEN,
        kl_terms.k3_ratio,
        "Equal to `unbiased` without its cap; written out, since float32 autograd loses the "
        "gradient from d = 16 on.",
    ),
    _published_estimator(
        "k3_reversed",
        Gradient.OTHER,
        kl_terms.k3_reversed,
        "Its value is chi-square minus the KL, its gradient half that of chi-square; both grow "
        "like exp(k1).",
    ),
    _published_estimator(
        "abs",
        Gradient.OTHER,
        kl_terms.absolute,
        "Neither value nor gradient is that of a KL, and the expected gradient does not depend on "
        "the distance to the reference.",
    ),
    _published_estimator(
        "k1_reward",
        Gradient.REVERSE_SEQUENCE,
        kl_terms.k1_reward,
        "The whole gradient of the KL between completions, on policy, with noise that grows with "
        "their length.",
    ),
    _published_estimator(
        "k1_reward_immediate",
        Gradient.REVERSE_TOKEN,
        kl_terms.k1_reward_immediate,
        "The token-level gradient of KL(policy || reference): on policy it is `unbiased`.",
    ),
    _published_estimator(
        "exp_k1_reward",
        Gradient.OTHER,
        kl_terms.exp_k1_reward,
        "Not a KL of policy samples: the value is several times too large, and the gradient is not "
        "that of a KL.",
    ),
)

ESTIMATORS = {estimator.name: estimator for estimator in _ALL_ESTIMATORS}


def kl_term(name: str, inputs: KLInputs, *, aggregation: Aggregation) -> Float[Any, "N"]:
    """Return the named KL term of every token, 0 outside the mask, to be summed with weights.

    Formula: the row of that name in `kl_terms.py`.
    Symbols: as there.
    Assumes: the terms are summed with the weights of `aggregation`, computed from the full mask.
    Source: as there.

    >>> import numpy as np
    >>> inputs = KLInputs.on_policy(logp=np.log([0.5, 0.5]), logp_ref=np.log([0.25, 0.5]))
    >>> kl_term("k3", inputs, aggregation="token_mean").round(4)
    array([0.1931, 0.    ])
    """
    if name not in ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {name!r}. Use one of {', '.join(ESTIMATORS)}.")
    if name == "sequence" and aggregation == "sequence_mean":
        raise ConfigError(
            "the KL estimator is sequence with sequence_mean: dividing by the row's own length "
            "lets a longer completion lower the KL, so the gradient is no longer that of the KL. "
            "Use a constant denominator (dr_grpo), token_mean, or the estimator unbiased."
        )
    return ESTIMATORS[name].term(inputs.zero_outside_mask())
