"""`klinic.train(...)`: the Python entry point, on the same path as `klinic train`."""

from inspect import signature
from typing import Any

from rich.console import Console

from klinic.errors import KlinicError
from klinic.trackers.notebook import NotebookTracker, runs_in_notebook
from klinic.training.result import Result
from klinic.training.train import StartMode
from klinic.training.train import train as train_recipe
from klinic.training.train_call import TrainCall

PYTHON_WORDS = {
    "--resume": "resume_from_checkpoint=True",
    "--start-over": "overwrite_output_dir=True",
}
"""Flags in messages, as arguments of a call."""


def train(  # noqa: PLR0913 - the arguments of TRL's trainer
    model: Any,
    reward_funcs: Any = None,
    args: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    *,
    peft_config: Any = None,
    callbacks: Any = None,
    reward_weights: Any = None,
    resume_from_checkpoint: Any = None,
    overwrite_output_dir: bool = False,
    resume: bool = False,
    **settings: Any,
) -> Result:
    """Train a model with GRPO.

    The arguments are those of TRL's `GRPOTrainer` and `GRPOConfig`; every recipe key is accepted
    as well. One error lists everything that cannot be had, each with what to do instead.

    Args:
        model: A folder, a hub id, `tiny`, or a model in memory, with or without a PEFT adapter. A
            model in memory is left as it is: the run trains a copy in its folder.
        reward_funcs: A function or a list of functions with TRL's signature: `prompts`,
            `completions` and every column by keyword. `"my_rewards.py:correct"` names a function.
        args: A `GRPOConfig`, or a mapping of its arguments. Its defaults are TRL's. Keywords of
            the call win.
        train_dataset: Rows with a `prompt`: a `datasets.Dataset`, a list of mappings, or the name
            of a file or a hub dataset.
        eval_dataset: Held-out rows of the same form.
        processing_class: The tokenizer; by default that of the model.
        peft_config: A `LoraConfig` for a new adapter. Its dropout stays off.
        callbacks: `TrainerCallback` objects with `on_train_begin`, `on_step_end`, `on_log`,
            `on_evaluate`, `on_save` or `on_train_end`.
        reward_weights: One factor per reward function.
        resume_from_checkpoint: True, or the folder of the run, to continue from its newest
            checkpoint.
        overwrite_output_dir: Whether to rename the run that is in the folder, and start a new one.
        resume: The same as `resume_from_checkpoint=True`.
        settings: Other arguments of `GRPOConfig`, and recipe keys, dotted or by a short name:
            `kl_coef=0.01`, `max_steps=100`, `kl=klinic.KL(estimator="exact")`.

    Returns:
        The folder, the metrics and the model of the run.
    """
    call = TrainCall(args, settings, arguments=signature(train).parameters)
    start = call.read_start(resume_from_checkpoint, overwrite=overwrite_output_dir, resume=resume)
    call.read_data(train_dataset, eval_dataset)
    call.read_model(model, processing_class, peft_config)
    call.read_rewards(reward_funcs, reward_weights)
    call.read_callbacks(callbacks)
    try:
        return _run(call, start)
    except KlinicError as error:
        error.args = (_python_words(str(error)), *error.args[1:])
        raise


def _run(call: TrainCall, start: StartMode) -> Result:
    loaded = call.resolve()
    console = Console(highlight=False, force_jupyter=False)
    for line in call.describe(loaded):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)
    max_steps = loaded.recipe.loop.max_steps
    return train_recipe(
        loaded.recipe,
        name=loaded.name,
        inputs=call.inputs(),
        start=start,
        console=console,
        view=NotebookTracker(max_steps=max_steps) if runs_in_notebook() else None,
    )


def _python_words(message: str) -> str:
    """Return a message with the flags of the command line as arguments of a call.

    >>> _python_words("Continue that run with --resume.")
    'Continue that run with resume_from_checkpoint=True.'
    """
    for flag, argument in PYTHON_WORDS.items():
        message = message.replace(flag, argument)
    return message
