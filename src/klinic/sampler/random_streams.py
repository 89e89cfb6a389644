"""The random numbers of a completion, as a function of what it is and of nothing else.

A completion is named by (run seed, step, prompt, sample), and needs one uniform number a token. So
a step can be drawn again after a crash, on another machine or in another batch, and two samples of
a prompt never share a stream.
"""

import numpy as np
from jaxtyping import Float


def uniforms(
    *, seed: int, step: int, prompt: int, sample: int, num: int, skip: int = 0
) -> Float[np.ndarray, "num"]:
    """Return the numbers for tokens `skip` to `skip + num` of a completion, in [0, 1).

    >>> one = uniforms(seed=1, step=2, prompt=3, sample=4, num=5)
    >>> bool((uniforms(seed=1, step=2, prompt=3, sample=4, num=2, skip=3) == one[3:]).all())
    True
    """
    stream = np.random.Generator(
        np.random.Philox(np.random.SeedSequence((seed, step, prompt, sample)))
    )
    return stream.random(skip + num)[skip:]


def engine_seed(*, seed: int, step: int, prompt: int, sample: int, skip: int) -> int:
    """Return the seed of a completion for an engine that draws by itself.

    >>> engine_seed(seed=1, step=2, prompt=3, sample=4, skip=0)
    3477347119187041574
    """
    state = np.random.SeedSequence((seed, step, prompt, sample, skip)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # engines take signed numbers
