"""Imports a user's KL function and infers the role of each argument from its name."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from klinic.errors import FunctionError, KlinicError, error_text
from klinic.recipe.function import find_function, make_instance
from klinic.runtime.user_code import guard_process

Role = Literal[
    "logp", "logp_ref", "logp_old", "logits", "logits_ref", "mask", "padding_mask", "tokens"
]

# Prefixes of words in argument names; suffixes of words that start with "log".
REFERENCE_WORDS = ("ref", "base", "init", "teacher", "sft", "frozen")
POLICY_WORDS = ("pol", "actor", "student", "new", "curr")
SAMPLER_WORDS = ("old", "sampl", "behav", "rollout", "infer", "vllm")
MASK_WORDS = ("mask",)
INVERTED_MASK_WORDS = ("pad", "ignore")
TOKEN_WORDS = ("label", "token", "action", "id")
POLICY_NAMES = {"logp", "logps", "logprob", "logprobs", "log_prob", "log_probs", "logits"}
NAMED_KINDS = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
ALLOWED_ROLES = (
    ["logp", "logp_ref"],
    ["logp", "logp_old", "logp_ref"],
    ["logits", "logits_ref"],
    ["logits", "logits_ref", "logp_old"],
)
EXTRA_ROLES = {"mask", "padding_mask", "tokens"}
# A boolean mask is the commonest; `1 - mask` needs numbers.
MASK_DTYPES = (torch.bool, torch.float64, torch.int64)


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

    @property
    def takes_mask(self) -> bool:
        """Whether it takes a mask of the tokens."""
        return bool({"mask", "padding_mask"} & set(self.roles.values()))

    @property
    def takes_tokens(self) -> bool:
        """Whether it takes the ids of the sampled tokens."""
        return "tokens" in self.roles.values()

    def __call__(self, arrays: dict[str, Tensor]) -> Tensor:
        """Call the function on copies of the arrays; any failure raises FunctionError.

        Without a `mask`, every token counts; without `tokens`, every id is 0.
        """
        first = arrays["logits" if self.takes_logits else "logp"]
        arrays = {"tokens": torch.zeros(first.shape[:2], dtype=torch.int64)} | arrays
        mask = arrays.get("mask", torch.ones(first.shape[:2], dtype=torch.bool))
        failures = []
        for dtype in MASK_DTYPES if self.takes_mask else MASK_DTYPES[:1]:
            masks = {"mask": mask.to(dtype), "padding_mask": (~mask).to(dtype)}
            try:
                result = self._call_once(arrays | masks)
            except FunctionError as error:
                failures.append(error)
            else:
                return _validate_result(self.name, result, first)
        raise failures[0]

    def _call_once(self, arrays: dict[str, Tensor]) -> Any:
        # clones: an in-place operation must not change the inputs of the next call
        arguments = {name: arrays[role].clone() for name, role in self.roles.items()}
        try:
            with guard_process(self.name):
                return self.call(**arguments)
        except (KeyboardInterrupt, KlinicError):
            raise
        except BaseException as error:  # a user's code may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arguments.items())
            raise FunctionError(
                f"{self.name} failed on {shapes}: {type(error).__name__}: {error_text(error)}. It "
                "must take such tensors and return a KL per token."
            ) from error


def load_user_function(target: str) -> UserFunction:
    """Return the KL function named by `module:function` or `path/to/file.py:function`.

    `Class.method`, a class with `__call__`, and an `nn.Module` work as well.
    """
    example = "my_trainer.losses:kl_penalty; or `direction` or `importance-sampling`"
    function: Any = find_function(target, example=example)
    name = target.rpartition(":")[2]
    if inspect.isclass(function):
        function = make_instance(function, target)
    if not callable(function):
        raise FunctionError(f"{target} is a class whose instances cannot be called. Name a method.")
    return UserFunction(name=name, call=function, roles=_argument_roles(name, function))


def _argument_roles(name: str, function: Callable[..., Any]) -> dict[str, Role]:
    # the signature of a module's __call__ is (*args, **kwargs)
    described = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(described).parameters.values()
    except ValueError as error:
        raise FunctionError(
            f"the signature of {name} cannot be inspected. Wrap it: def f(logp, logp_ref): return "
            f"{name}(logp, logp_ref)."
        ) from error
    required = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED_KINDS]
    optional = [
        p.name
        for p in parameters
        if p.default is None and _has_word(p.name, (*SAMPLER_WORDS, *MASK_WORDS))
    ]
    roles = _assign_roles(required + optional)
    if sorted(role for role in roles.values() if role not in EXTRA_ROLES) not in ALLOWED_ROLES:
        raise FunctionError(
            f"{name} takes ({', '.join(required) or 'nothing'}). It must take the log-probs of the "
            "tokens under policy and reference, f(logp, logp_ref), and may take `logp_old` as a "
            "third; or the logits of both, f(logits, logits_ref), and may take the `tokens`. "
            "Either may take a `mask`. Wrap it in a function that does."
        )
    return roles


def _assign_roles(names: list[str]) -> dict[str, Role]:
    """Assign roles by argument name, and by position where the names are ambiguous."""
    extras = {name: role for name in names if (role := _extra_role(name)) is not None}
    roles: dict[str, Any] = dict(extras)
    remaining = [name for name in names if name not in extras]
    kind = "logits" if any("logit" in name.lower() for name in remaining) else "logp"
    sampler_names = [name for name in remaining if _has_word(name, SAMPLER_WORDS)]
    if len(remaining) - len(sampler_names) < 2:  # `sampled_logps`: those of the sampled tokens
        sampler_names = []
    remaining = [name for name in remaining if name not in sampler_names]
    references = [name for name in remaining if _has_word(name, REFERENCE_WORDS)]
    if not references:  # the only argument not named like a policy, else the second
        policies = [
            name for name in remaining if name in POLICY_NAMES or _has_word(name, POLICY_WORDS)
        ]
        unmatched = [name for name in remaining if name not in policies]
        references = unmatched if len(policies) == len(unmatched) == 1 else remaining[1:2]
    roles |= dict.fromkeys(remaining, kind)
    roles |= dict.fromkeys(sampler_names, "logp_old") | dict.fromkeys(references, f"{kind}_ref")
    return {name: roles[name] for name in names}


def _extra_role(name: str) -> Role | None:
    """Return the role of a mask or of token ids; log-probs per token are neither."""
    if _has_word(name, MASK_WORDS):
        return "padding_mask" if _has_word(name, INVERTED_MASK_WORDS) else "mask"
    is_score = any(part in name.lower() for part in ("log", "prob"))
    return "tokens" if _has_word(name, TOKEN_WORDS) and not is_score else None


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
