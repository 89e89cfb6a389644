"""Names of the causes that a replay can prove; imports no torch, unlike `changes`."""

PROVABLE_CAUSES = frozenset(
    [
        "stale-sampler",
        "truncation-not-mirrored",
        "corrupted-sync",
        "gradient-not-cleared",
        "temperature-on-one-side",
        "wrong-reference",
        "misaligned-logp",
        "retokenised",
        "wrong-loss-mask",
        "kl-gradient-wrong",
        "kl-not-applied",
        "kl-sign-flipped",
        "kl-tail-dominates",
        "nan-outside-mask",
        "hidden-sampling-transform",
        "stop-token-fault",
        "advantage-explodes",
        "wrong-groups",
        "loss-scaled-wrong",
        "dropout-in-scoring",
        "layout-changes-logp",
        "step-too-big",
        "policy-does-not-move",
        "broken-reward",
        "moved-reference",
        "samples-too-old",
        "broken-sampler",
        "wrong-metric",
    ]
)
