"""Imports a user's KL function and infers the role of each argument from its name."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from klinic.errors import FunctionError, KlinicError, error_text
from klinic.recipe.function import find_function
from klinic.runtime.user_code import guard_process

Role = Literal["logp", "logp_ref", "logp_old", "logits", "logits_ref"]

# Prefixes of words in argument names; suffixes of words that start with "log".
REFERENCE_WORDS = ("ref", "base", "init", "teacher", "sft", "frozen")
POLICY_WORDS = ("pol", "actor", "student", "new", "curr")
SAMPLER_WORDS = ("old", "sampl", "behav", "rollout")
POLICY_NAMES = {"logp", "logps", "logprob", "logprobs", "log_prob", "log_probs", "logits"}
NAMED_KINDS = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
ALLOWED_ROLES = (
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
    def takes_logp_old(self) -> bool:
        """Whether it takes the log-probs of the policy that sampled."""
        return "logp_old" in self.roles.values()

    def __call__(self, arrays: dict[str, Tensor]) -> Tensor:
        """Call the function on copies of the arrays; any failure raises FunctionError."""
        # clones: an in-place operation must not change the inputs of the next call
        arguments = {name: arrays[role].clone() for name, role in self.roles.items()}
        try:
            with guard_process(self.name):
                result = self.call(**arguments)
        except (KeyboardInterrupt, KlinicError):
            raise
        except BaseException as error:  # a user's code may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arguments.items())
            raise FunctionError(
                f"{self.name} failed on {shapes}: {type(error).__name__}: {error_text(error)}. It "
                "must take such tensors and return a KL per token."
            ) from error
        return _validate_result(self.name, result, next(iter(arguments.values())))


def load_user_function(target: str) -> UserFunction:
    """Return the KL function named by `module:function` or `path/to/file.py:function`."""
    example = "my_trainer.losses:kl_penalty; or `direction` or `importance-sampling`"
    function = find_function(target, example=example)
    name = target.rpartition(":")[2]
    return UserFunction(name=name, call=function, roles=_argument_roles(name, function))


def _argument_roles(name: str, function: Callable[..., Any]) -> dict[str, Role]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise FunctionError(
            f"the signature of {name} cannot be inspected. Wrap it: def f(logp, logp_ref): return "
            f"{name}(logp, logp_ref)."
        ) from error
    required = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED_KINDS]
    optional = [
        p.name for p in parameters if p.default is None and _has_word(p.name, SAMPLER_WORDS)
    ]
    roles = _assign_roles(required + optional)
    if sorted(roles.values()) not in ALLOWED_ROLES:
        raise FunctionError(
            f"{name} takes ({', '.join(required) or 'nothing'}). It must take the log-probs of the "
            "tokens under policy and reference, f(logp, logp_ref), and may take `logp_old` as a "
            "third; or the logits of both, f(logits, logits_ref). Wrap it in a function that does."
        )
    return roles


def _assign_roles(names: list[str]) -> dict[str, Role]:
    """Assign roles by argument name, and by position where the names are ambiguous."""
    kind = "logits" if any("logit" in name.lower() for name in names) else "logp"
    sampler_names = [name for name in names if _has_word(name, SAMPLER_WORDS)]
    remaining = [name for name in names if name not in sampler_names]
    references = [name for name in remaining if _has_word(name, REFERENCE_WORDS)]
    if not references:  # the only argument not named like a policy, else the second
        policies = [
            name for name in remaining if name in POLICY_NAMES or _has_word(name, POLICY_WORDS)
        ]
        unmatched = [name for name in remaining if name not in policies]
        references = unmatched if len(policies) == len(unmatched) == 1 else remaining[1:2]
    roles: dict[str, Any] = dict.fromkeys(remaining, kind)
    roles |= dict.fromkeys(sampler_names, "logp_old") | dict.fromkeys(references, f"{kind}_ref")
    return {name: roles[name] for name in names}


def _has_word(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a word of the name matches: `old_logps`, `logpOld`, `logpold`, not `threshold`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(
        word.startswith(prefixes) or (word.startswith("log") and word.endswith(prefixes))
        for word in words
    )


def _validate_result(name: str, result: Any, first: Tensor) -> Tensor:
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
