"""The `learner` section: the loss and the optimizer."""

from typing import Annotated, Literal

from klinic.recipe.section import Count, CountOrZero, Section, within

# literals, for editors and type checkers; tests compare them with the registries of klinic.maths
LossName = Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo"]
AdvantageName = Literal["none", "group_mean", "leave_one_out", "group_std", "batch"]


class LearnerSection(Section):
    """Loss, advantages, optimizer and batching."""

    loss: LossName = "dr_grpo"
    """Policy-gradient loss and its aggregation over tokens."""
    advantage: AdvantageName = "leave_one_out"
    """Baseline and scale of rewards; changes the effective strength of `kl.coef`."""
    clip_low: Annotated[float, within("the ratio is held above 1 - clip_low", above=0, high=1)] = (
        0.2
    )
    """The ratio to the sampling policy is clipped at 1 - clip_low."""
    clip_high: Annotated[float, within("the ratio is held below 1 + clip_high", above=0)] = 0.2
    """The ratio to the sampling policy is clipped at 1 + clip_high."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-6
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate until `loop.max_steps`."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the learning rate from 0."""
    reward_warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the advantages from 0; the KL term is not scaled."""
    weight_decay: Annotated[float, within("a negative one makes weights grow", low=0)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, within("gradients of norm 0 change nothing", above=0)] = 1.0
    """Gradients are clipped to this norm."""
    updates_per_batch: Count = 1
    """Optimizer updates per batch of completions."""
    micro_batch_size: Count = 8
    """Completions of maximum length per forward and backward pass, more if shorter: affects
    memory, not the result."""
    shards: Count = 1
    """Number of FSDP2 processes that shard the weights; 1: no sharding."""
    mask_truncated: bool = False
    """Whether completions truncated at the length limit are masked out of the policy term."""
    overlong_buffer: CountOrZero = 0
    """Tokens before the limit over which a penalty grows from 0 to -1; 0: no penalty."""
