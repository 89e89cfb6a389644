"""Rollouts as small as they can be."""

import numpy as np

from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment


def rollout(text, *, index=0, prompt="1+1=", columns=None, **others):
    """Return one completion whose token ids are the code points of its text."""
    ids = np.array([ord(c) for c in text], np.int64)
    said = Segment(token_ids=ids, emitted_by=EmittedBy.POLICY, logp_sampler=None, weight_version=0)
    asked = Prompt(index=index, text=prompt, token_ids=np.array([7]), columns=columns or others)
    return Rollout(prompt=asked, sample=0, segments=(said,), finish_reason="stop", text=text)
