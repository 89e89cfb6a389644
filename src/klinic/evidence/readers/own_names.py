"""Recognises usual metrics under the names of an own loop: `mean_reward`, `KL div`, `gradNorm`.

Names are compared by their words; words that only say "mean of the training batch" are ignored.
`approx_kl`, `ppo_kl`, `old_kl` and `policy_kl` stay unread: often they compare with the policy
before the update.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
IGNORED_WORDS = frozenset({"mean", "avg", "average", "train", "training", "rollout", "batch"})
LONGEST_NAME = 80  # characters

OWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "loss": ("total loss", "policy loss", "pg loss", "actor loss"),
    "grad_norm": ("gnorm", "gradient norm", "gradnorm", "total grad norm", "global grad norm"),
    "learning_rate": ("lr",),
    "reward": ("rewards", "return", "returns", "score", "scores", "total reward"),
    "reward_std": ("std reward", "rewards std", "std rewards"),
    "reward/min": ("min reward",),
    "reward/max": ("max reward",),
    "advantage/min": ("min advantage", "advantages min"),
    "advantage/max": ("max advantage", "advantages max"),
    "kl": (
        *("kl div", "kl divergence", "kldiv", "kl ref", "ref kl", "kl to ref", "kl reference"),
        *("kl to reference", "reference kl", "kl per token", "token kl"),
    ),
    "entropy": ("policy entropy", "token entropy", "actor entropy"),
    "completions/clipped_ratio": (
        *("clipped ratio", "truncated", "truncated ratio", "truncated frac", "frac truncated"),
        *("truncated fraction", "truncation rate", "truncation ratio", "fraction truncated"),
    ),
    "sampler/gap": ("logp gap", "logprob gap"),
}
"""Further names of klinic's metrics, as lower-case words; each metric's own name is one."""


def split_words(name: str) -> tuple[str, ...]:
    """Return the words of a name without those that are ignored.

    >>> split_words("train/mean_reward"), split_words("gradNorm"), split_words("KL divergence")
    (('reward',), ('grad', 'norm'), ('kl', 'divergence'))
    """
    words = (word.lower() for word in WORD.findall(name[:LONGEST_NAME]))
    return tuple(word for word in words if word not in IGNORED_WORDS)


@lru_cache(maxsize=1)
def _metric_of_words() -> dict[tuple[str, ...], str]:
    return {
        split_words(name): metric
        for metric, names in OWN_NAMES.items()
        for name in (metric, *names)
    }


def recognise_metric(name: str) -> str | None:
    """Return klinic's name of a metric with a usual name, or None.

    >>> [recognise_metric(name) for name in ("avg_return", "kl-div", "approx_kl", "eval_reward")]
    ['reward', 'kl', None, None]
    """
    return _metric_of_words().get(split_words(name))
