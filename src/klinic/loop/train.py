"""From a recipe to a trained model: assembles a run, starts or resumes it, returns its result."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console

from klinic.doctor.warning_signs import Signs
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS, write_run_facts, write_tokens
from klinic.learner.checkpoint import MODEL
from klinic.learner.protocol import Learner
from klinic.loop import checkpoint
from klinic.loop.assembly import (
    both_pack,
    conversing,
    identity,
    make_learner,
    make_sampler,
    start_policy,
    start_reference,
)
from klinic.loop.async_loop import run_async_loop
from klinic.loop.data import Prompts
from klinic.loop.describe import run_facts
from klinic.loop.folder import ENGINE_LOG, as_named, locked, move_aside, open_folder, write_recipe
from klinic.loop.loop import run_loop
from klinic.loop.resuming import find_start, refuse_other_schema, resume
from klinic.loop.run import Run
from klinic.loop.source import Given, Source, find_source
from klinic.loop.state import LoopState
from klinic.loop.stopping import stop_event
from klinic.loop.trackers.chosen import chosen, refuse_missing
from klinic.loop.trackers.protocol import Tracker
from klinic.maths.kl_coef import KLCoefState
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.adapters import base_digest
from klinic.model.chat import PromptEncoder
from klinic.model.determinism import settle_kernels
from klinic.model.loading import BUILT_IN, Policy
from klinic.recipe.recipe import Recipe

if TYPE_CHECKING:
    from klinic.loop.clustered import Clustered

Start = Literal["new", "resume", "over"]
"""In a new folder, from the newest checkpoint, or in the folder of a run that is moved aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run."""

    folder: Path
    step: int
    before: dict[str, float]
    """Held-out metrics before the first step."""
    after: dict[str, float]
    signal: int | None
    """The signal that stopped the run early, if any."""

    @property
    def model(self) -> Path:
        """Folder of the trained model, for `from_pretrained`."""
        return self.folder / checkpoint.FOLDER / checkpoint.name_of(self.step) / MODEL


def train(
    recipe: Recipe,
    *,
    name: str,
    given: Given,
    start: Start = "new",
    console: Console,
    view: Tracker | None = None,
) -> Result:
    """Train a recipe, or resume its run.

    `view` replaces the console as a tracker.
    """
    refuse_missing(recipe.output)
    settle(recipe)
    if start == "resume":  # before the recipe's own functions are imported
        refuse_other_schema(open_folder(recipe, name, resume=True))
    source = find_source(recipe, given)
    if start == "over" and (aside := move_aside(recipe, name)) is not None:
        say(console, f"The previous run was moved to {aside}.")
    shown = open_folder(recipe, name, resume=start == "resume")
    folder = shown.absolute()  # a reward may change the working directory
    with locked(folder):
        say(console, f"Run: {shown}")
        found = find_start(folder) if start == "resume" else None
        result = _train_in(folder, recipe, source, found, console=console, view=view)
    return replace(result, folder=shown)


def _train_in(
    folder: Path,
    recipe: Recipe,
    source: Source,
    found: checkpoint.Found | None,
    *,
    console: Console,
    view: Tracker | None,
) -> Result:
    """Train in a locked folder; `search` holds the checkpoint to resume from."""
    say(console, f"Sizes: {recipe.sizes()}")
    if recipe.kl is not None:
        sentence = ESTIMATORS[recipe.kl.estimator].sentence
        say(console, f"KL {recipe.kl.estimator}: {sentence}")
    # first: makes a killed run resumable, and gives `klinic watch` the number of steps
    write_recipe(folder, recipe)
    run = assemble(recipe, folder, source, console, view)
    with run:
        resumed = None if found is None else resume(run, found, console)
        state = begin(run) if resumed is None else resumed
        run.open_doctor(after=state.step)
        for tracker in run.trackers:
            tracker.begin(step=state.step)
        if run.evaluated is None:
            run.evaluated = run.evaluate(0)
            if recipe.recovery is not None:
                run.save(state)  # a rollback always has a target
        if state.step >= recipe.loop.max_steps:
            say(console, "The run is complete. Raise loop.max_steps to continue.")
        state = _trained(run, state)
        run.doctor.hear(state.step)  # a run killed after its last save has not reported it
    if run.stopping.signal is not None:  # last: marks a clean stop
        run.events.append(stop_event(state.step, run.stopping.signal))
    return Result(
        folder=folder,
        step=state.step,
        before=run.evaluated or {},
        after=_last_evaluation(folder),
        signal=run.stopping.signal,
    )


def _trained(run: Run, state: LoopState) -> LoopState:
    """Train to the end, with prefetched rollouts where the recipe allows staleness."""
    kl, most = run.recipe.kl, run.recipe.max_staleness
    if run.cluster is None or not most:
        return run_loop(run, state, kl)
    return run_async_loop(run, state, kl, most=most, freeze=run.cluster.freeze)


def say(console: Console, text: str) -> None:
    """Print a line without markup, highlighting or wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def settle(recipe: Recipe) -> None:
    """Make computations in this process deterministic."""
    settle_kernels()
    # thread synchronization costs the tiny model more than it gains
    threads = 1 if recipe.threads is None and recipe.model.name in BUILT_IN else recipe.threads
    if threads is not None:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=True)


def assemble(
    recipe: Recipe, folder: Path, source: Source, console: Console, view: Tracker | None = None
) -> Run:
    """Return the assembled run."""
    # first: a tracker that cannot work fails before a model loads
    trackers = chosen(recipe, folder, console, view)
    policy, where = start_policy(recipe, as_named(folder, recipe), source, console)
    data = Prompts(
        source.rows,
        encode=PromptEncoder(policy.tokenizer, policy.name),
        per_step=recipe.loop.prompts_per_step,
        seed=recipe.seed,
    )
    data.refuse_long(window=policy.context_window, max_new_tokens=recipe.sampling.max_new_tokens)
    with ExitStack() as opened:
        cluster = _cluster(recipe, folder, console)
        if cluster is not None:
            opened.callback(cluster.close)
        learner, reference = _learner(recipe, policy, where, cluster)
        opened.callback(learner.close)
        if recipe.sampler.type != "transformers":
            say(console, f"Sampler: {recipe.sampler.server or 'starting vLLM ...'}")
        if cluster is None:
            sampler = make_sampler(recipe, policy, folder / ENGINE_LOG)
        else:
            sampler = cluster.sampler(policy, where)
        opened.pop_all()  # from here on the run closes them
    return Run(
        cluster=cluster,
        recipe=recipe,
        folder=folder,
        source=source,
        policy=policy,
        learner=learner,
        sampler=conversing(sampler, policy, source.reply),
        data=data,
        trackers=trackers,
        reference=reference,
        base=base_digest(policy.lm),
    )


def _cluster(recipe: Recipe, folder: Path, console: Console) -> "Clustered | None":
    """Start the Ray workers of a run, if the recipe has a cluster."""
    if recipe.cluster is None:
        return None
    from klinic.loop.clustered import Clustered

    say(console, f"Cluster: {recipe.cluster.address or 'starting Ray ...'}")
    return Clustered(recipe, folder)


def _learner(
    recipe: Recipe, policy: Policy, where: str, cluster: "Clustered | None"
) -> tuple[Learner, dict[str, Any]]:
    """Return the learner, single-process or sharded, and the identity of its reference."""
    if recipe.learner.shards > 1:
        from klinic.loop.shards import STORE, lead

        return lead(recipe, policy, where, None if cluster is None else cluster.followers(STORE))
    reference = start_reference(recipe, policy, where)
    packed = both_pack(policy, reference)
    return make_learner(recipe, policy, reference, packed=packed), identity(reference)


def begin(run: Run) -> LoopState:
    """Write run.json and the token texts of a new run; return its initial state."""
    write_run_facts(run.folder, run_facts(run.recipe, run.policy, run.reference))
    write_tokens(run.folder, _token_texts(run.policy))
    run.signs = Signs()
    kl = run.recipe.kl
    return LoopState(kl=None if kl is None else KLCoefState(coef=kl.coef))


def _token_texts(policy: Policy) -> dict[int, str]:
    known = min(len(policy.tokenizer), policy.vocabulary_size)
    return {i: policy.tokenizer.decode([i]) for i in range(known)}


def _last_evaluation(folder: Path) -> dict[str, float]:
    last: dict[str, float] = {}
    for entry in Journal(folder / METRICS).entries():
        if any(name.startswith("eval/") for name in entry):
            # non-finite values are null in a journal
            known = {name: value for name, value in entry.items() if value is not None}
            last = {name: value for name, value in known.items() if name.startswith("eval/")}
    return last
