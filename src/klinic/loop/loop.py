"""The synchronous training loop: run a step, then record it or recover from its anomaly."""

from klinic.loop.parts import Parts
from klinic.loop.state import LoopState
from klinic.loop.step import one_step
from klinic.loop.watch import InTroubleError
from klinic.recipe.kl import KLSection


def run_loop(parts: Parts, state: LoopState, kl: KLSection | None) -> LoopState:
    """Train from `state` to the last step or a stop request."""
    while state.step < parts.max_steps:
        try:
            done, after = one_step(parts, state, kl)
            goes_on = parts.keep(done, after)
        except InTroubleError as found:
            parts.learner.discard()
            state = parts.recover(found, state)
            continue
        state = after
        if not goes_on:
            break
    return state
