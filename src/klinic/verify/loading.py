"""Find the function a user named, and work out from its arguments how it wants to be called."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from klinic.errors import FunctionError

Role = Literal["logp", "logp_ref", "logp_old", "logits", "logits_ref"]

REFERENCE = ("ref", "base", "init")
OLDER = ("old", "sampler", "sampling", "behav", "rollout", "generator")
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
EXPECTED = (
    ["logp", "logp_ref"],
    ["logp", "logp_old", "logp_ref"],
    ["logits", "logits_ref"],
)


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A user's KL function and what each of its arguments wants to be."""

    name: str
    call: Callable[..., Any]
    roles: dict[str, Role]
    """From the name of an argument to what it is given."""

    @property
    def takes_logits(self) -> bool:
        """Whether it wants whole rows of logits instead of the log-probs of the tokens."""
        return "logits" in self.roles.values()

    @property
    def takes_old(self) -> bool:
        """Whether it can tell tokens of an older policy from fresh ones."""
        return "logp_old" in self.roles.values()

    def __call__(self, arrays: dict[str, Tensor]) -> Tensor:
        """Call it, and say in a sentence what went wrong if something did."""
        given = {name: arrays[role] for name, role in self.roles.items()}
        try:
            result = self.call(**given)
        except Exception as error:  # a user's code may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
            raise FunctionError(
                f"{self.name} failed on {shapes}: {type(error).__name__}: {error}. It must take "
                "such tensors and return a KL per token."
            ) from error
        return _checked(self.name, result, next(iter(given.values())))


def load(target: str) -> UserFunction:
    """Return the function named by `module:function` or `path/to/file.py:function`."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise FunctionError(
            f"{target!r} names no function. Write module:function or path/to/file.py:function, "
            "for example my_trainer.losses:kl_penalty."
        )
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise FunctionError(
            f"{place} has no function {name!r}. It has: {', '.join(sorted(known)) or 'none'}."
        )
    return UserFunction(name=name, call=function, roles=_roles(name, function))


def _module(place: str) -> ModuleType:
    if place.endswith(".py") and not Path(place).is_file():
        raise FunctionError(f"{place} is not a file. Give its path from {Path.cwd()}.")
    try:
        if place.endswith(".py"):
            return _from_file(Path(place))
        # what `python -c` could import from here, a console script should find too
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:  # importing runs a user's code
        raise FunctionError(
            f"{place} cannot be imported: {type(error).__name__}: {error}. Run the command where "
            "`python -c 'import ...'` works, or give the path of the file."
        ) from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _roles(name: str, function: Callable[..., Any]) -> dict[str, Role]:
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED]
    optional = [p.name for p in parameters if p.default is not p.empty and _has(p.name, OLDER)]
    roles = _assign(needed + optional)
    if sorted(roles.values()) not in EXPECTED:
        raise FunctionError(
            f"{name} takes ({', '.join(needed) or 'nothing'}). It must take the log-probs of the "
            "tokens under policy and reference, f(logp, logp_ref), and may take `logp_old` as a "
            "third; or the logits of both, f(logits, logits_ref). Wrap it in a function that does."
        )
    return roles


def _assign(names: list[str]) -> dict[str, Role]:
    """Give roles by name where the names tell, and by place where they do not."""
    kind = "logits" if any("logit" in name.lower() for name in names) else "logp"
    older = [name for name in names if _has(name, OLDER)]
    others = [name for name in names if name not in older]
    references = [name for name in others if _has(name, REFERENCE)] or others[1:2]
    roles: dict[str, Any] = dict.fromkeys(others, kind)
    roles |= dict.fromkeys(older, "logp_old") | dict.fromkeys(references, f"{kind}_ref")
    return {name: roles[name] for name in names}


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _checked(name: str, result: Any, first: Tensor) -> Tensor:
    if not isinstance(result, Tensor):
        raise FunctionError(
            f"{name} returned {type(result).__name__}, not a tensor. Return the KL of each token, "
            "before any mean."
        )
    per_token, per_row = tuple(first.shape[:2]), tuple(first.shape[:1])
    if tuple(result.shape) not in {per_token, per_row}:
        raise FunctionError(
            f"{name} returned the shape {list(result.shape)} for tokens of shape "
            f"{list(per_token)}. Return one KL a token {list(per_token)}, or one a completion "
            f"{list(per_row)}; leave the mean over the batch to the trainer."
        )
    return result
