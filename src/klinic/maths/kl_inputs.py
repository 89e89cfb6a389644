"""Inputs of a KL term: log-probs of policy, sampler and reference over concatenated tokens."""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Bool, Float, Int

from klinic.maths import kl
from klinic.maths.arrays import array_namespace, check_one_per_row, check_rows, stop_gradient
from klinic.maths.importance import ImportanceSampling, above_cap, importance_weight
from klinic.maths.masked import apply_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class KLInputs:
    """Tensors that the KL term of one step reads. Rows are concatenated."""

    group: Int[Any, "B"]
    """Group of each row: rows of one group are completions of one prompt."""
    row_offsets: Int[Any, "B+1"]
    logp: Float[Any, "N"]
    logp_old: Float[Any, "N"]
    logp_sampler: Float[Any, "N"]
    """Reported by the sampler, else `logp_old`; the run records which."""
    logp_ref: Float[Any, "N"]
    """Of the frozen model that the KL is measured to: the reference, or a teacher."""
    loss_mask: Bool[Any, "N"]
    kl_exact: Float[Any, "N"] | None = None
    """KL(policy || reference) over the whole vocabulary, with gradient (`kl.exact`)."""
    kl_topk: Float[Any, "N"] | None = None
    """The same over the top k and a rest bucket, with gradient (`kl.topk`)."""
    kl_baseline: Float[Any, "N"] | None = None
    """Baseline of `sequence`: mean future KL of the other group members at this position. Required
    where a group spans micro-batches; None: computed from the rows of this batch."""
    importance_sampling: ImportanceSampling = field(default_factory=ImportanceSampling)
    """Mode and cap of the weights of off-policy tokens."""

    def __post_init__(self) -> None:
        check_rows(self.row_offsets, **self._token_arrays())
        check_one_per_row(self.row_offsets, group=self.group)

    @classmethod
    def on_policy(cls, *, logp: Any, logp_ref: Any, **fields: Any) -> "KLInputs":
        """Return the inputs of one completion sampled from the policy, every token trained."""
        xp = array_namespace(logp)
        return cls(
            group=xp.zeros(1, dtype=xp.int64, device=logp.device),
            row_offsets=xp.asarray([0, len(logp)], device=logp.device),
            logp=logp,
            logp_old=stop_gradient(logp),
            logp_sampler=stop_gradient(logp),
            logp_ref=logp_ref,
            loss_mask=xp.ones_like(logp, dtype=xp.bool),
            **fields,
        )

    def _token_arrays(self) -> dict[str, Any]:
        required_names = ("logp", "logp_old", "logp_sampler", "logp_ref", "loss_mask")
        optional_names = ("kl_exact", "kl_topk", "kl_baseline")
        return {name: getattr(self, name) for name in required_names + optional_names}

    def zero_outside_mask(self) -> "KLInputs":
        """Return the inputs with 0 outside the mask, where terms get no value and no gradient."""
        arrays = {k: v for k, v in self._token_arrays().items() if k != "loss_mask"}
        masked: dict[str, Any] = {
            k: None if v is None else apply_mask(v, self.loss_mask) for k, v in arrays.items()
        }
        return replace(self, **masked)

    @property
    def importance_weight(self) -> Any:
        """Weight of each token, by mode and cap."""
        return importance_weight(self.importance_sampling, **self.sampled_arrays())

    def sampled_arrays(self) -> dict[str, Any]:
        """Keyword arguments of the functions of `importance`."""
        names = ("logp", "logp_sampler", "loss_mask", "row_offsets")
        return {name: getattr(self, name) for name in names}

    @property
    def policy_and_ref(self) -> dict[str, Any]:
        """Keyword arguments of a `kl` function for KL(policy || reference)."""
        return {"logp_p": self.logp, "logp_q": self.logp_ref}

    @property
    def k1_old(self) -> Any:
        """k1 at `logp_old`, for estimators that put the KL into the reward."""
        return kl.k1(logp_p=self.logp_old, logp_q=self.logp_ref)


def num_saturated(inputs: KLInputs) -> Int[Any, ""]:
    """Return the number of trained tokens whose weight is above the cap, where the inputs are.

    >>> import numpy as np
    >>> args = {k: np.zeros(1) for k in ("logp", "logp_old", "logp_ref")}
    >>> int(num_saturated(KLInputs(group=np.array([0]), row_offsets=np.array([0, 1]), **args,
    ...     logp_sampler=np.array([-3.0]), loss_mask=np.array([True]))))
    1
    """
    return above_cap(inputs.importance_sampling, **inputs.sampled_arrays()).sum()
