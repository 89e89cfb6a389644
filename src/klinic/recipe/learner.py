"""The `learner` section: the loss and the optimiser."""

from typing import Annotated, Literal

from klinic.recipe.section import Count, CountOrZero, Section, within

# spelt out for editors and type checkers; tests hold both to the registries of klinic.maths
LossName = Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo"]
AdvantageName = Literal["none", "group_mean", "leave_one_out", "group_std", "batch"]


class LearnerSection(Section):
    """How rewards become an update."""

    loss: LossName = "dr_grpo"
    """Policy term and how tokens are averaged."""
    advantage: AdvantageName = "leave_one_out"
    """What a reward is compared with; it changes what `kl.coef` means."""
    clip_low: Annotated[float, within("the ratio is held above 1 - clip_low", above=0, high=1)] = (
        0.2
    )
    """How far the ratio to the sampling policy may fall below 1."""
    clip_high: Annotated[float, within("the ratio is held below 1 + clip_high", above=0)] = 0.2
    """How far the ratio to the sampling policy may rise above 1."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-6
    """Step size of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls until `loop.max_steps`."""
    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises from 0 to its value."""
    reward_warmup_steps: CountOrZero = 0
    """Steps in which what advantages count for rises from 0 to all; the KL is not scaled."""
    weight_decay: Annotated[float, within("a negative one makes weights grow", low=0)] = 0.0
    """Decay of AdamW."""
    max_grad_norm: Annotated[float, within("gradients of norm 0 change nothing", above=0)] = 1.0
    """Longer gradients are scaled down to this norm."""
    updates_per_batch: Count = 1
    """Updates made on the completions of one step."""
    micro_batch_size: Count = 8
    """Completions of the longest length in one forward and backward pass, and more of shorter
    ones: memory, not the result."""
    shards: Count = 1
    """Processes that share the weights by FSDP2; 1 is this one alone."""
    mask_truncated: bool = False
    """Whether completions cut off at the length limit leave the policy term."""
    overlong_buffer: CountOrZero = 0
    """Tokens before the limit over which a penalty rises from 0 to -1; 0 is no penalty."""
