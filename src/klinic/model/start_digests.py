"""Digests of a policy's weights at the start of a run, for its reference, run.json and checkpoints.

A digest reads every weight, which takes minutes for a large model: it is computed once, in the
first process, and only if something needs it.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from torch import Tensor

from klinic.model.adapters import base_digest, has_adapter, policy_digest
from klinic.model.weights import digest, is_sharded


class StartDigests:
    """Digests of a policy, computed at the first use, which must precede the first update."""

    def __init__(self, lm: Any) -> None:
        """Take the policy; None for empty digests.

        All ranks of a sharded one must use them alike.
        """
        self._lm = lm

    @property
    def policy(self) -> str:
        """Digest of base and trained adapter."""
        return self._digests[0]

    @property
    def base(self) -> str | None:
        """Digest of the base weights under an adapter; None without an adapter."""
        return self._digests[1] if self._lm is None or has_adapter(self._lm) else None

    def of_other(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the digest of another model's weights; empty where those of the policy are."""
        return "" if self._lm is None else digest(tensors)

    @cached_property
    def _digests(self) -> tuple[str, str]:
        lm = self._lm
        if lm is None:
            return "", ""
        if not has_adapter(lm):
            return policy_digest(lm), ""
        if any(is_sharded(p) for p in lm.parameters()):  # all ranks gather in the same order
            return policy_digest(lm), base_digest(lm) or ""
        # two passes over the same bytes, in a different order: hashing releases the GIL
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-digest") as pool:
            base = pool.submit(base_digest, lm)
            return policy_digest(lm), base.result() or ""
