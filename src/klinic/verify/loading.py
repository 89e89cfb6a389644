"""Imports a user's KL function and infers the role of each argument from its name."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from klinic.errors import FunctionError, KlinicError, text_of
from klinic.recipe.function import find_function
from klinic.user_code import guard

Role = Literal["logp", "logp_ref", "logp_old", "logits", "logits_ref"]

# Prefixes of words in argument names; suffixes of words that start with "log".
REFERENCE = ("ref", "base", "init", "teacher", "sft", "frozen")
POLICY = ("pol", "actor", "student", "new", "curr")
OLDER = ("old", "sampl", "behav", "rollout")
PLAIN = {"logp", "logps", "logprob", "logprobs", "log_prob", "log_probs", "logits"}
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
EXPECTED = (
    ["logp", "logp_ref"],
    ["logp", "logp_old", "logp_ref"],
    ["logits", "logits_ref"],
)


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A user's KL function and the role of each of its arguments."""

    name: str
    call: Callable[..., Any]
    roles: dict[str, Role]
    """Role by argument name."""

    @property
    def takes_logits(self) -> bool:
        """Whether it takes logits over the vocabulary instead of log-probs of the tokens."""
        return "logits" in self.roles.values()

    @property
    def takes_old(self) -> bool:
        """Whether it takes the log-probs of the policy that sampled."""
        return "logp_old" in self.roles.values()

    def __call__(self, arrays: dict[str, Tensor]) -> Tensor:
        """Call the function on copies of the arrays; any failure raises FunctionError."""
        # clones: an in-place operation must not change the inputs of the next call
        given = {name: arrays[role].clone() for name, role in self.roles.items()}
        try:
            with guard(self.name):
                result = self.call(**given)
        except (KeyboardInterrupt, KlinicError):
            raise
        except BaseException as error:  # a user's code may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
            raise FunctionError(
                f"{self.name} failed on {shapes}: {type(error).__name__}: {text_of(error)}. It "
                "must take such tensors and return a KL per token."
            ) from error
        return _checked(self.name, result, next(iter(given.values())))


def load(target: str) -> UserFunction:
    """Return the KL function named by `module:function` or `path/to/file.py:function`."""
    example = "my_trainer.losses:kl_penalty; or `direction` or `importance-sampling`"
    function = find_function(target, example=example)
    name = target.rpartition(":")[2]
    return UserFunction(name=name, call=function, roles=_roles(name, function))


def _roles(name: str, function: Callable[..., Any]) -> dict[str, Role]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise FunctionError(
            f"the signature of {name} cannot be inspected. Wrap it: def f(logp, logp_ref): return "
            f"{name}(logp, logp_ref)."
        ) from error
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED]
    optional = [p.name for p in parameters if p.default is None and _has(p.name, OLDER)]
    roles = _assign(needed + optional)
    if sorted(roles.values()) not in EXPECTED:
        raise FunctionError(
            f"{name} takes ({', '.join(needed) or 'nothing'}). It must take the log-probs of the "
            "tokens under policy and reference, f(logp, logp_ref), and may take `logp_old` as a "
            "third; or the logits of both, f(logits, logits_ref). Wrap it in a function that does."
        )
    return roles


def _assign(names: list[str]) -> dict[str, Role]:
    """Assign roles by argument name, and by position where the names are ambiguous."""
    kind = "logits" if any("logit" in name.lower() for name in names) else "logp"
    older = [name for name in names if _has(name, OLDER)]
    others = [name for name in names if name not in older]
    references = [name for name in others if _has(name, REFERENCE)]
    if not references:  # the only argument not named like a policy, else the second
        policies = [name for name in others if name in PLAIN or _has(name, POLICY)]
        left = [name for name in others if name not in policies]
        references = left if len(policies) == len(left) == 1 else others[1:2]
    roles: dict[str, Any] = dict.fromkeys(others, kind)
    roles |= dict.fromkeys(older, "logp_old") | dict.fromkeys(references, f"{kind}_ref")
    return {name: roles[name] for name in names}


def _has(name: str, beginnings: tuple[str, ...]) -> bool:
    """Whether a word of the name matches: `old_logps`, `logpOld`, `logpold`, not `threshold`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(
        word.startswith(beginnings) or (word.startswith("log") and word.endswith(beginnings))
        for word in words
    )


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
            f"{list(per_token)}. Return one KL per token {list(per_token)}, or one per completion "
            f"{list(per_row)}; the trainer takes the mean over the batch."
        )
    return result
