"""From a recipe to a trained model: assembles a run, starts or resumes it, returns its result."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console

from klinic.data.prompts import PromptDataset
from klinic.doctor.warning_signs import WarningState
from klinic.evidence.files import Journal
from klinic.evidence.remote.url import is_url
from klinic.evidence.run_facts import (
    METRICS,
    display_path,
    end_like_facts,
    write_run_facts,
    write_tokens,
)
from klinic.maths.kl_coef import KLCoefState
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.chat import PromptEncoder
from klinic.model.determinism import initialize_vml_kernels, use_deterministic_kernels
from klinic.model.device import device_name, move_model, unused_accelerator
from klinic.model.loading import BUILT_IN_MODELS, Policy, uses_bf16_head
from klinic.model.start_digests import StartDigests
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import ModelSection
from klinic.trackers.protocol import Tracker
from klinic.trackers.select import make_trackers, refuse_missing_extras
from klinic.training import checkpoint
from klinic.training.build import (
    StartedLearner,
    can_pack_rows,
    frozen_identities,
    load_start_policy,
    make_learner,
    make_sampler,
    start_reference,
    start_section,
    start_teacher,
    wrap_multi_turn,
)
from klinic.training.given_model import save_given_model
from klinic.training.loop import run_async_loop, run_loop
from klinic.training.parts import RunParts
from klinic.training.published_run import prepare_working_folder, publish_run
from klinic.training.result import Result
from klinic.training.resume import find_resume_point, refuse_other_schema, resume_run
from klinic.training.run import Run
from klinic.training.run_facts import run_facts
from klinic.training.run_folder import (
    ENGINE_LOG,
    START_FOLDER,
    lock_folder,
    move_aside,
    open_folder,
    resume_folder,
    write_recipe,
)
from klinic.training.signals import stop_event
from klinic.training.source import PythonInputs, TaskData, load_task_data
from klinic.training.state import LoopState

if TYPE_CHECKING:
    from klinic.training.ray_run import RayWorkers

StartMode = Literal["new", "resume", "over"]
"""In a new folder, from the newest checkpoint, or in the folder of a run that is moved aside."""


def train(
    recipe: Recipe,
    *,
    name: str,
    inputs: PythonInputs,
    start: StartMode = "new",
    console: Console,
    view: Tracker | None = None,
) -> Result:
    """Train a recipe, or resume its run.

    `view` replaces the console as a tracker.
    """
    refuse_missing_extras(recipe.output)
    make_deterministic(recipe)
    prepare_working_folder(recipe.output.dir, start=start, say=partial(print_line, console))
    if start == "resume":  # before the recipe's own functions are imported
        if inputs.model is not None:
            recipe = start_from_folder(recipe, resume_folder(recipe, name))
        refuse_other_schema(open_folder(recipe, name, resume=True))
    task_data = load_task_data(recipe, inputs)
    if start == "over" and (old_folder := move_aside(recipe, name)) is not None:
        print_line(console, f"The previous run was moved to {old_folder}.")
    display_folder = open_folder(recipe, name, resume=start == "resume")
    folder = display_folder.absolute()  # a reward may change the working directory
    with lock_folder(folder):
        print_line(console, f"Run: {display_folder}{published_at(recipe)}")
        if inputs.model is not None:
            save_given_model(inputs.model, inputs.tokenizer, folder / START_FOLDER)
            recipe = start_from_folder(recipe, folder)
        search = find_resume_point(folder) if start == "resume" else None
        result = _train_in(folder, recipe, task_data, search, console=console, view=view)
    return replace(result, folder=display_folder)


def _train_in(
    folder: Path,
    recipe: Recipe,
    task_data: TaskData,
    search: checkpoint.CheckpointSearch | None,
    *,
    console: Console,
    view: Tracker | None,
) -> Result:
    """Train in a locked folder; `search` holds the checkpoint to resume from."""
    print_line(console, f"Sizes: {recipe.sizes()}")
    for line in kl_lines(recipe):
        print_line(console, line)
    # first: makes a killed run resumable, and gives `klinic watch` the number of steps
    write_recipe(folder, recipe)
    with publish_run(folder, recipe.output.dir) as publishing:
        run = assemble_run(recipe, folder, task_data, console, view)
        run.publishing = publishing
        state = _train_assembled(run, search, console)
    return Result(
        folder=folder,
        step=state.step,
        before=run.initial_eval or {},
        after=_last_evaluation(folder),
        signal=run.stop_signal.signal,
    )


def _train_assembled(
    run: Run, search: checkpoint.CheckpointSearch | None, console: Console
) -> LoopState:
    """Start or resume an assembled run, and train it to its end."""
    recipe = run.recipe
    for line in device_lines(recipe, run.parts.policy):
        print_line(console, line)
    with run:
        resumed = None if search is None else resume_run(run, search, console)
        state = start_new_run(run) if resumed is None else resumed
        run.publishing.claim(run.record_event)
        run.open_doctor(after=state.step)
        for tracker in run.parts.trackers:
            tracker.begin(step=state.step)
        run.begin_callbacks(state.step)
        if run.initial_eval is None:
            run.initial_eval = run.evaluate(0)
            if recipe.recovery is not None:
                run.save(state)  # a rollback always has a target
        if state.step >= recipe.loop.max_steps:
            print_line(console, "The run is complete. Raise loop.max_steps to continue.")
        state = _run_training(run, state)
        run.end_callbacks(state.step)
        # a run killed after its last save has not reported it
        run.doctor.report_diagnosis(state.step)
    if run.stop_signal.signal is not None:  # last: marks a clean stop
        run.log.events.append(stop_event(state.step, run.stop_signal.signal))
    return state


def published_at(recipe: Recipe) -> str:
    """Return where a run is published as its first line says it; empty if it is local."""
    chosen = recipe.output.dir
    return f", published at {chosen}" if chosen is not None and is_url(chosen) else ""


def kl_lines(recipe: Recipe) -> list[str]:
    """Return the console lines about the KL terms of a run."""
    lines, teacher = [], recipe.teacher
    if recipe.kl is not None:
        lines.append(f"KL {recipe.kl.estimator}: {ESTIMATORS[recipe.kl.estimator].sentence}")
    if teacher is not None:
        beside = "instead of the rewards" if teacher.alone else "beside the rewards"
        lines.append(
            f"Teacher: {teacher.path}, KL by {teacher.estimator}, coefficient {teacher.coef:g}, "
            f"{beside}"
        )
    return lines


def start_from_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a run that starts from the model that was saved in its folder."""
    name = str(folder.absolute() / START_FOLDER)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})


def device_lines(recipe: Recipe, policy: Policy) -> list[str]:
    """Return lines with the device of a run, and an accelerator that it leaves unused."""
    if recipe.learner.shards > 1:
        return []  # several processes, each with its device
    device = policy.scorer.device
    attention = policy.lm.config._attn_implementation
    lines = [f"Device: {device_name(device)}, {recipe.model.dtype}, attention {attention}"]
    if unused := unused_accelerator(device):
        lines.append(f"A device of type {unused} is not used: model.device is {device}.")
    return lines


def _run_training(run: Run, state: LoopState) -> LoopState:
    """Train to the end, with prefetched rollouts where the recipe allows staleness."""
    cluster, max_staleness = run.parts.cluster, run.recipe.max_staleness
    if cluster is None or not max_staleness:
        return run_loop(run, state)
    return run_async_loop(run, state, max_staleness=max_staleness)


def print_line(console: Console, text: str) -> None:
    """Print a line verbatim; a terminal breaks it between words."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def make_deterministic(recipe: Recipe) -> None:
    """Make computations in this process deterministic."""
    initialize_vml_kernels()
    # thread synchronization costs the tiny model more than it gains
    threads = (
        1 if recipe.threads is None and recipe.model.name in BUILT_IN_MODELS else recipe.threads
    )
    if threads is not None:
        torch.set_num_threads(threads)
    use_deterministic_kernels()


def assemble_run(
    recipe: Recipe, folder: Path, task_data: TaskData, console: Console, view: Tracker | None = None
) -> Run:
    """Return the assembled run."""
    # first: a tracker that cannot work fails before a model loads
    trackers = make_trackers(recipe, folder, console, view)
    section = start_section(recipe, display_path(folder, recipe), task_data, console)
    policy = load_start_policy(recipe, section, task_data)
    prompts = PromptDataset(
        task_data.rows,
        encode=PromptEncoder(policy.tokenizer, policy.name),
        prompts_per_step=recipe.loop.prompts_per_step,
        seed=recipe.seed,
    )
    prompts.refuse_long_prompts(
        window=policy.context_window, max_new_tokens=recipe.sampling.max_new_tokens
    )
    with ExitStack() as cleanup:
        cluster = _start_ray_workers(recipe, folder, console)
        if cluster is not None:
            cleanup.callback(cluster.close)
            if recipe.learner.shards == 1 and recipe.model.device != "cpu":
                move_model(policy.lm, cluster.learner_device)
                scorer = policy.scorer
                scorer.head.in_bf16 = uses_bf16_head(policy.lm, scorer.autocast)
        started = _start_learner(recipe, policy, section, task_data, cluster)
        learner, policy = started.learner, started.policy
        cleanup.callback(learner.close)
        if recipe.sampler.type != "transformers":
            print_line(console, f"Sampler: {recipe.sampler.server or 'starting vLLM ...'}")
        if cluster is None:
            sampler = make_sampler(recipe, policy, learner, folder / ENGINE_LOG)
        else:
            sampler = cluster.make_sampler(recipe, policy, learner, section.name)
        cleanup.pop_all()  # from here on the run closes them
    parts = RunParts(
        cluster=cluster,
        recipe=recipe,
        folder=folder,
        task_data=task_data,
        policy=policy,
        learner=learner,
        sampler=wrap_multi_turn(sampler, policy, task_data.reply),
        prompt_dataset=prompts,
        trackers=trackers,
        reference=started.frozen.reference,
        teacher=started.frozen.teacher,
        digests=started.digests,
    )
    return Run(parts)


def _start_ray_workers(recipe: Recipe, folder: Path, console: Console) -> "RayWorkers | None":
    """Start the Ray workers of a run, if the recipe has a cluster."""
    if recipe.cluster is None:
        return None
    from klinic.training.ray_run import RayWorkers

    print_line(console, f"Cluster: {recipe.cluster.address or 'starting Ray ...'}")
    return RayWorkers(recipe, folder)


def _start_learner(
    recipe: Recipe,
    policy: Policy,
    section: ModelSection,
    task_data: TaskData,
    cluster: "RayWorkers | None",
) -> StartedLearner:
    """Return the learner of a policy; one of several processes loads its own shards."""
    if recipe.learner.shards > 1:
        from klinic.training.learner_processes import STORE_VARIABLE, start_sharded_learner

        return start_sharded_learner(
            recipe,
            section.name,
            tokenizer=task_data.inputs.tokenizer,
            processes=None if cluster is None else cluster.learner_processes(STORE_VARIABLE),
        )
    digests = StartDigests(policy.lm)
    reference = start_reference(recipe, policy, section.name, digests)
    teacher = start_teacher(recipe, policy, digests)
    packed = can_pack_rows(policy, reference, teacher)
    return StartedLearner(
        learner=make_learner(recipe, policy, reference, teacher=teacher, packed=packed),
        policy=policy,
        digests=digests,
        frozen=frozen_identities(reference, teacher),
    )


def start_new_run(run: Run) -> LoopState:
    """Write run.json and the token texts of a new run; return its initial state."""
    parts = run.parts
    texts = _token_texts(parts.policy)
    write_run_facts(parts.folder, {**run_facts(parts), **end_like_facts(texts)})
    write_tokens(parts.folder, texts)
    run.signs = WarningState()
    kl = run.recipe.kl
    return LoopState(kl=None if kl is None else KLCoefState(coef=kl.coef))


def _token_texts(policy: Policy) -> dict[int, str]:
    num_tokens = min(len(policy.tokenizer), policy.vocabulary_size)
    return {i: policy.tokenizer.decode([i]) for i in range(num_tokens)}


def _last_evaluation(folder: Path) -> dict[str, float]:
    last: dict[str, float] = {}
    for entry in Journal(folder / METRICS).entries():
        if any(name.startswith("eval/") for name in entry):
            # non-finite values are null in a journal
            finite = {name: value for name, value in entry.items() if value is not None}
            last = {name: value for name, value in finite.items() if name.startswith("eval/")}
    return last
