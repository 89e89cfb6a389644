"""The training loops, synchronous and with rollouts that a thread prefetches.

Each runs a step, then records it or recovers from its anomaly.
"""

from klinic.training.guards import StepAnomalyError
from klinic.training.prefetch import RolloutPrefetcher
from klinic.training.protocol import TrainingRun
from klinic.training.state import LoopState
from klinic.training.step import run_step


def run_loop(run: TrainingRun, state: LoopState) -> LoopState:
    """Train from `state` to the last step or a stop request."""
    while state.step < run.recipe.loop.max_steps:
        try:
            completed, next_state = run_step(run, state)
            should_continue = run.record_step(completed, next_state)
        except StepAnomalyError as anomaly:
            run.learner.discard()
            state = run.recover(anomaly, state)
            continue
        state = next_state
        if not should_continue:
            break
    return state


def run_async_loop(run: TrainingRun, state: LoopState, *, max_staleness: int) -> LoopState:
    """Train to the last step or a stop request, on batches at most `max_staleness` steps old."""
    should_continue = True
    while should_continue and state.step < run.recipe.loop.max_steps:
        try:
            with RolloutPrefetcher(run, state, max_staleness=max_staleness) as prefetcher:
                while should_continue and state.step < run.recipe.loop.max_steps:
                    completed, next_state = run_step(run, state, prefetcher)
                    should_continue = run.record_step(completed, next_state)
                    state = next_state
        except StepAnomalyError as anomaly:
            run.learner.discard()
            state = run.recover(anomaly, state)
    return state
