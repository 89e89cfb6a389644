"""Sizes of one step of a recipe, at its largest."""

from klinic.learner.looks import share_of_looks
from klinic.loop.assembly import learner_settings
from klinic.loop.lengths import Lengths
from klinic.model.work import StepSizes
from klinic.recipe.recipe import Recipe


def step_sizes(recipe: Recipe, lengths: Lengths, *, tied: bool, trained: bool) -> StepSizes:
    """Return the sizes of a step after the first.

    `uses_reference` is whether the reference is scored, `has_kl_term` whether the loss has a KL
    term.
    """
    objective, settings = learner_settings(recipe)
    vocabulary = trained and objective.needs_vocabulary
    kept = vocabulary and settings.keeps_top(objective)
    return StepSizes(
        prompts=recipe.loop.prompts_per_step,
        group=recipe.loop.group_size,
        prompt_length=lengths.longest,
        completion_length=recipe.sampling.max_new_tokens,
        micro_batch=settings.micro_batch_size,
        updates=settings.updates_per_batch,
        scores_old=settings.updates_per_batch > 1 or (vocabulary and objective.needs_baseline),
        reference=tied,
        whole_vocabulary=vocabulary and not kept,
        kept_top=kept,
        apart=share_of_looks(recipe.loop.max_steps) if trained else 0,
        checkpointing=recipe.model.gradient_checkpointing,
        along_the_row=not objective.token_by_token,
    )
