"""Random numbers of a completion, determined by its identity alone.

A completion is identified by (run seed, step, prompt, sample) and uses one uniform number per
token. A step can therefore be sampled again after a crash, on another machine or in another batch,
and two samples of a prompt never share a stream.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


def uniforms(
    *, seed: int, step: int, prompt: int, sample: int, num: int, skip: int = 0
) -> Float[np.ndarray, "num"]:
    """Return the uniform numbers in [0, 1) for tokens `skip` to `skip + num` of a completion.

    >>> one = uniforms(seed=1, step=2, prompt=3, sample=4, num=5)
    >>> bool((uniforms(seed=1, step=2, prompt=3, sample=4, num=2, skip=3) == one[3:]).all())
    True
    """
    stream = np.random.Generator(
        np.random.Philox(np.random.SeedSequence((seed, step, prompt, sample)))
    )
    return stream.random(skip + num)[skip:]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStream:
    """The identity of the uniform numbers that a turn of a completion takes."""

    seed: int
    step: int
    prompt: int
    sample: int
    num: int
    """How many tokens the turn may have."""
    skip: int = 0
    """How many tokens of the policy precede it."""

    def uniforms(self) -> Float[np.ndarray, "num"]:
        """Return the numbers."""
        return uniforms(
            seed=self.seed,
            step=self.step,
            prompt=self.prompt,
            sample=self.sample,
            num=self.num,
            skip=self.skip,
        )


def engine_seed(*, seed: int, step: int, prompt: int, sample: int, skip: int) -> int:
    """Return the seed of a completion for an engine with its own RNG.

    >>> engine_seed(seed=1, step=2, prompt=3, sample=4, skip=0)
    3477347119187041574
    """
    state = np.random.SeedSequence((seed, step, prompt, sample, skip)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # engines take signed integers
