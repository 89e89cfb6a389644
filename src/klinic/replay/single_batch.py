"""`klinic check`: run every component of a recipe on two small batches before a long run.

Nothing is kept: the run uses a temporary folder, and its update is discarded. The second batch is
needed because many faults show only once policy and reference differ.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from klinic.checks import CHECKS
from klinic.doctor.cases import CaseBuilder
from klinic.doctor.diagnosis import Examination
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import read_run_facts
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.model.adapter_files import is_adapter
from klinic.model.loading import load_merged_policy, num_parameters
from klinic.recipe.recipe import Recipe
from klinic.replay.check_report import CheckReport
from klinic.replay.device_check import MAX_PARAMETERS, compare_with_cpu
from klinic.replay.self_test import (
    PeakMemory,
    check_sampler_gap,
    describe_memory,
    record_with_signal,
    try_updates,
)
from klinic.training.run import Run
from klinic.training.run_folder import START_FOLDER
from klinic.training.source import PythonInputs, TaskData, load_task_data
from klinic.training.state import CompletedStep, LoopState
from klinic.training.step import run_step
from klinic.training.step_metrics import add_update_facts
from klinic.training.train import assemble_run, make_deterministic, start_new_run
from klinic.training.warm_start import is_cached, warm_start

NUM_PROMPTS, GROUP_SIZE = 8, 2  # per batch
NUM_WARM_STEPS = 40  # steps of a warm start that is not cached
NUM_SHOWN = 3  # completions


PredictMemory = Callable[[Recipe], int | None]
"""Maps a recipe to its predicted peak memory in bytes; None if that is not known."""


def check_single_batch(
    recipe: Recipe,
    report: Callable[[str], None],
    *,
    predict_memory: PredictMemory | None = None,
    result: CheckReport | None = None,
) -> CheckReport:
    """Run the components of a recipe on two batches; `report` receives progress messages.

    With `predict_memory` the device is tested in full. `result` is filled as the components are
    tested, so that a caller has the results from before an error.
    """
    result = CheckReport() if result is None else result
    make_deterministic(recipe)
    with tempfile.TemporaryDirectory(prefix="klinic-check-") as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir()
        small = _small_recipe(recipe, folder)
        report("loading the components")
        source = load_task_data(small, PythonInputs())
        small = _provide_warm_start(small, source, folder)
        run = assemble_run(small, folder, source, Console(quiet=True))
        with run:
            state = start_new_run(run)
            predicted = None if predict_memory is None else predict_memory(small)
            peak = _run_checks(run, recipe, state, result, report, full=predict_memory is not None)
            if predict_memory is not None:
                result.components.append(describe_memory(peak, predicted))
    return result


def _small_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with two small batches and no trackers."""
    loop = recipe.loop.model_copy(
        update={
            "prompts_per_step": min(NUM_PROMPTS, recipe.loop.prompts_per_step),
            "group_size": GROUP_SIZE,
            "extra_rounds": 0,
            "max_steps": 2,
        }
    )
    output = recipe.output.model_copy(
        update={"dir": str(folder), "trackers": (), "records_every": 0, "doctor": "tell"}
    )
    return recipe.model_copy(update={"loop": loop, "output": output, "recovery": None})


def _provide_warm_start(small: Recipe, source: TaskData, folder: Path) -> Recipe:
    """Provide the warm start: the cached one, or a short one."""
    section = small.warm_start
    refused = is_adapter(small.model.name) and small.model.lora_rank is None
    if section is None or refused:  # the run raises the error
        return small
    policy = load_merged_policy(small.model, temperature=1.0, seed=0)
    if not is_cached(policy, small):
        short = section.model_copy(update={"steps": min(NUM_WARM_STEPS, section.steps)})
        small = small.model_copy(update={"warm_start": short})
    warm_start(policy, small, source.task, lambda *_: None).copy_to(folder / START_FOLDER)
    return small


def _warm_start_note(small: Recipe, recipe: Recipe) -> str:
    if small.warm_start is None or recipe.warm_start is None:
        return ""
    steps, whole = small.warm_start.steps, recipe.warm_start.steps
    return f" (warm start cut to {steps} of {whole} steps)" if steps < whole else ""


def _run_checks(
    run: Run,
    recipe: Recipe,
    state: LoopState,
    result: CheckReport,
    report: Callable[[str], None],
    *,
    full: bool,
) -> int | None:
    """Run the two steps, and report on each component; return their peak memory if measured.

    `full` tests the device too.
    """
    memory = PeakMemory(run.parts.policy.scorer.device)
    sizes = num_parameters(run.parts.policy.lm)
    name = recipe.model.name + _warm_start_note(run.recipe, recipe)
    result.add_component(
        "model and device",
        f"{name}, {sizes['num_parameters']:,} parameters, "
        f"{sizes['num_trainable']:,} trained, on {run.parts.policy.scorer.device}",
    )
    examination, cases = Examination(CHECKS), CaseBuilder(read_run_facts(run.parts.folder))
    report("the first batch: sampling, rewards, scoring, one update")
    with memory.measure():
        done, state = run_step(run, state)
    first = run.collect_metrics(done)
    _add_components(run, done, first, result)
    examination.add_case(cases.next_case(add_update_facts(done, first), run.probe_results, first))
    report("a non-finite gradient")
    _check_non_finite(run, done, result)
    report("the same batch on the CPU")
    _compare_device(run, done, result)
    if full:
        report("waits of the host, save and resume")
        _test_device(run, done, first, result)
    report("the second batch: the KL term, now that the policy has moved")
    with memory.measure():
        done, state = run_step(run, state)
    second = run.collect_metrics(done)
    examination.add_case(cases.next_case(add_update_facts(done, second), run.probe_results, second))
    result.diagnosis = examination.conclude()
    return memory.num_bytes


def _compare_device(run: Run, done: CompletedStep, result: CheckReport) -> None:
    """Compare a learner on an accelerator with a copy on the CPU."""
    learner, policy = run.learner, run.parts.policy
    if policy.scorer.device.type == "cpu" or not isinstance(learner, LocalLearner):
        return
    if (num := num_parameters(policy.lm)["num_parameters"]) > MAX_PARAMETERS:
        result.add_component(
            "device", f"not compared with the CPU: {num:,} parameters. Check a smaller model too."
        )
        return
    compared = compare_with_cpu(
        learner,
        record_with_signal(done.record),
        kl_coef=_kl_coef(run),
        dtype=run.recipe.model.dtype,
    )
    result.add_component("device", compared.describe(), ok=compared.ok)


def _test_device(
    run: Run, done: CompletedStep, metrics: dict[str, float], result: CheckReport
) -> None:
    """Test sampler, host waits and checkpoints of a learner on its device."""
    learner, record = run.learner, record_with_signal(done.record)
    assert isinstance(learner, LocalLearner)  # noqa: S101 - several processes were refused
    result.components.append(check_sampler_gap(metrics, dtype=run.recipe.model.dtype))
    folder = run.parts.folder.with_name("resume")
    result.components += try_updates(learner, record, kl_coef=_kl_coef(run), folder=folder)


def _kl_coef(run: Run) -> float:
    return 0.0 if run.recipe.kl is None else run.recipe.kl.coef


def _add_components(
    run: Run, done: CompletedStep, metrics: dict[str, float], result: CheckReport
) -> None:
    record = done.record
    cut = metrics.get("completions/clipped_ratio", 0.0)
    parsed = metrics.get("completions/parse_rate")
    parse_note = "" if parsed is None else f", {parsed:.0%} parsed"
    result.add_component(
        "sampling",
        f"{record.num_rows} completions of {metrics['completions/mean_length']:.1f} tokens"
        f"{parse_note}, {cut:.0%} truncated without EOS",
    )
    result.add_component(
        "rewards",
        f"mean {metrics['reward']:.3f}{_correct_answer_note(run)}",
        ok=_any_reward(record),
    )
    result.samples = list(_sample_completions(done))
    logp_difference = metrics.get("sampling/sampling_logp_difference/max", 0.0)
    result.add_component(
        "scoring",
        (
            f"{int(record.loss_mask.sum())} tokens, "
            f"{logp_difference:.1e} nats at most from the sampler"
        ),
        ok=bool(np.isfinite(record.logp[record.loss_mask]).all())
        if record.logp is not None
        else False,
    )
    k1 = mean_k1(record)
    kind = run.parts.reference["kind"]
    reference_detail = "none" if k1 is None else f"{kind}, {abs(k1):.1e} nats from the policy"
    result.add_component("reference", reference_detail)
    result.add_component(
        "update",
        f"loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.4f}, discarded"
        f"{_no_signal_note(record)}",
        ok=bool(np.isfinite(metrics["grad_norm"])),
    )


def _no_signal_note(record: StepRecord) -> str:
    if record.advantage is not None and not np.nan_to_num(record.advantage).any():
        return "; no group had two different rewards, so the advantages are 0"
    return ""


def _correct_answer_note(run: Run) -> str:
    regrade = run.probe_results.get("regrade")
    if not regrade or regrade.get("right_answers") is None:
        return ""
    return f", correct answers get {regrade['right_answers']:.3f}"


def _any_reward(record: StepRecord) -> bool:
    return record.reward is not None and bool(np.isfinite(record.reward).any())


def _sample_completions(done: CompletedStep) -> Iterator[tuple[str, str, float]]:
    rewards = done.record.reward
    assert rewards is not None  # noqa: S101 - the step has rewards
    for rollout, reward in list(zip(done.rollouts, rewards, strict=True))[:NUM_SHOWN]:
        yield rollout.prompt.text, rollout.text, float(reward)


def _check_non_finite(run: Run, done: CompletedStep, result: CheckReport) -> None:
    """Inject infinite advantages, and check that the update is discarded."""
    before = run.learner.publish().fingerprint
    # in every row: one with a single kept token at each position has no gradient
    advantage = np.full(done.record.num_rows, np.inf)
    poisoned = replace(done.record, advantage=advantage)
    scored = run.learner.score(poisoned, needs_reference=False)
    prepared = run.learner.prepare(scored, LossScales(kl_coef=0.0))
    run.learner.discard()
    same = run.learner.publish().fingerprint == before
    sites = [f"the {name}" for name, finite in prepared.finite_at.items() if not finite]
    result.add_component(
        "NaN handling",
        f"an infinite advantage is seen in {' and '.join(sites) or 'nothing'}; the update "
        f"is {'discarded' if same else 'applied'}",
        ok=same and bool(sites),
    )
