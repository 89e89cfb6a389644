"""`klinic.train(...)`: the Python entry point, on the same path as `klinic train`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console

from klinic.recipe.loading import from_keywords
from klinic.training.source import FROM_PYTHON, PythonInputs
from klinic.training.train import Result
from klinic.training.train import train as train_recipe


def train(
    model: str,
    *,
    reward_funcs: Callable[..., Any] | list[Callable[..., Any]] = (),  # type: ignore[assignment]
    train_dataset: Iterable[Mapping[str, Any]] | None = None,
    resume: bool = False,
    **settings: Any,
) -> Result:
    """Train a model with GRPO.

    `model` is a folder, a hub id or `tiny`. `reward_funcs` have TRL's signature. `train_dataset` is
    a list of rows or a `datasets.Dataset` with a `prompt` column. Every other keyword is a recipe
    key, dotted or by its short name: `kl_coef=0.01`, `max_steps=100`, `**{"kl.estimator":
    "exact"}`.
    """
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if train_dataset is not None:
        settings["data.path"] = FROM_PYTHON
    loaded = from_keywords(model=model, **settings)
    console = Console(highlight=False)
    for echo in loaded.notes:
        console.print(echo, markup=False)
    inputs = PythonInputs(reward_functions=functions, rows=train_dataset)
    return train_recipe(
        loaded.recipe,
        name=loaded.name,
        inputs=inputs,
        start="resume" if resume else "new",
        console=console,
    )
