"""The training loop with rollouts that are prefetched in a thread."""

from collections.abc import Callable

from klinic.loop.ahead import Ahead
from klinic.loop.parts import Parts
from klinic.loop.state import LoopState
from klinic.loop.step import one_step
from klinic.loop.watch import InTroubleError
from klinic.recipe.kl import KLSection


def run_async_loop(
    parts: Parts,
    state: LoopState,
    kl: KLSection | None,
    *,
    most: int,
    freeze: Callable[[], None],
) -> LoopState:
    """Train to the last step or a stop request, on batches at most `max_staleness` steps old."""
    goes_on = True
    while goes_on and state.step < parts.max_steps:
        try:
            with Ahead(parts, state, most=most, freeze=freeze) as collect:
                while goes_on and state.step < parts.max_steps:
                    done, after = one_step(parts, state, kl, collect)
                    goes_on = parts.keep(done, after)
                    state = after
        except InTroubleError as found:
            parts.learner.discard()
            state = parts.recover(found, state)
    return state
