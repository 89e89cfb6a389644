"""`klinic check`: run every component of a recipe on two small batches before a long run.

Nothing is kept: the run uses a temporary folder, and its update is discarded. The second batch is
needed because many faults show only once policy and reference differ.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import Diagnosis, Examination
from klinic.doctor.reading import Cases
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import read_run_facts
from klinic.loop.folder import START
from klinic.loop.run import Run
from klinic.loop.source import Given, Source, find_source
from klinic.loop.state import LoopState, StepDone
from klinic.loop.step import one_step
from klinic.loop.step_metrics import with_facts
from klinic.loop.train import assemble, begin, settle
from klinic.loop.warm_start import is_made, warm_start
from klinic.model.adapter_files import is_adapter
from klinic.model.loading import load_whole, num_parameters
from klinic.recipe.recipe import Recipe

PROMPTS, GROUP = 8, 2  # per batch
SHORT = 40  # steps of a warm start that is not cached
SHOWN = 3  # completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The result of one component."""

    name: str
    ok: bool
    says: str


@dataclass(slots=True, kw_only=True)
class Checked:
    """Results of all components, some completions, and the diagnosis."""

    parts: list[Part] = field(default_factory=list)
    shown: list[tuple[str, str, float]] = field(default_factory=list)
    """Prompt, completion and reward of some completions."""
    diagnosis: Diagnosis | None = None

    @property
    def ok(self) -> bool:
        """Whether every component works and no cause was found."""
        cause = None if self.diagnosis is None else self.diagnosis.cause
        return cause is None and all(part.ok for part in self.parts)

    def add(self, name: str, says: str, *, ok: bool = True) -> None:
        """Add the result of a component."""
        self.parts.append(Part(name=name, ok=ok, says=says))


def single_batch(recipe: Recipe, tell: Callable[[str], None]) -> Checked:
    """Run the components of a recipe on two batches; `report` receives progress messages."""
    found = Checked()
    settle(recipe)
    with tempfile.TemporaryDirectory(prefix="klinic-check-") as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir()
        small = _small(recipe, folder)
        tell("loading the components")
        source = find_source(small, Given())
        small = _warmed(small, source, folder)
        run = assemble(small, folder, source, Console(quiet=True))
        with run:
            state = begin(run)
            _examine(run, recipe, state, found, tell)
    return found


def _small(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with two small batches and no trackers."""
    loop = recipe.loop.model_copy(
        update={
            "prompts_per_step": min(PROMPTS, recipe.loop.prompts_per_step),
            "group_size": GROUP,
            "extra_rounds": 0,
            "max_steps": 2,
        }
    )
    output = recipe.output.model_copy(
        update={"dir": str(folder), "trackers": (), "records_every": 0, "doctor": "tell"}
    )
    return recipe.model_copy(update={"loop": loop, "output": output, "recovery": None})


def _warmed(small: Recipe, source: Source, folder: Path) -> Recipe:
    """Provide the warm start: the cached one, or a short one."""
    section = small.warm_start
    refused = is_adapter(small.model.name) and small.model.lora_rank is None
    if section is None or refused:  # the run raises the error
        return small
    policy = load_whole(small.model, temperature=1.0, seed=0)
    if not is_made(policy, small):
        short = section.model_copy(update={"steps": min(SHORT, section.steps)})
        small = small.model_copy(update={"warm_start": short})
    warm_start(policy, small, source.task, lambda *_: None).copy_to(folder / START)
    return small


def _warmth(small: Recipe, recipe: Recipe) -> str:
    if small.warm_start is None or recipe.warm_start is None:
        return ""
    steps, whole = small.warm_start.steps, recipe.warm_start.steps
    return f" (warm start cut to {steps} of {whole} steps)" if steps < whole else ""


def _examine(
    run: Run, recipe: Recipe, state: LoopState, found: Checked, tell: Callable[[str], None]
) -> None:
    """Run the two steps, and report on each component."""
    sizes = num_parameters(run.policy.lm)
    name = recipe.model.name + _warmth(run.recipe, recipe)
    found.add(
        "model and device",
        f"{name}, {sizes['num_parameters']:,} parameters, "
        f"{sizes['num_trainable']:,} trained, on {run.policy.scorer.device}",
    )
    examination, cases = Examination(CHECKS), Cases(read_run_facts(run.folder))
    tell("the first batch: sampling, rewards, scoring, one update")
    done, state = one_step(run, state, run.recipe.kl)
    first = run.metrics(done)
    _say_parts(run, done, first, found)
    examination.hear(cases.next(with_facts(done, first), run.asked, first))
    tell("a non-finite gradient")
    _nan(run, done, found)
    tell("the second batch: the KL term, now that the policy has moved")
    done, state = one_step(run, state, run.recipe.kl)
    second = run.metrics(done)
    examination.hear(cases.next(with_facts(done, second), run.asked, second))
    found.diagnosis = examination.conclude()


def _say_parts(run: Run, done: StepDone, metrics: dict[str, float], found: Checked) -> None:
    record = done.record
    cut = metrics.get("completions/clipped_ratio", 0.0)
    parsed = metrics.get("completions/parse_rate")
    read = "" if parsed is None else f", {parsed:.0%} parsed"
    found.add(
        "sampling",
        f"{record.num_rows} completions of {metrics['completions/mean_length']:.1f} tokens"
        f"{read}, {cut:.0%} truncated without EOS",
    )
    found.add("rewards", f"mean {metrics['reward']:.3f}{_gold(run)}", ok=_any_reward(record))
    found.shown = list(_some(done))
    apart = metrics.get("sampling/sampling_logp_difference/max", 0.0)
    found.add(
        "scoring",
        f"{int(record.loss_mask.sum())} tokens, {apart:.1e} nats at most from the sampler",
        ok=bool(np.isfinite(record.logp[record.loss_mask]).all())
        if record.logp is not None
        else False,
    )
    k1 = mean_k1(record)
    kind = run.reference["kind"]
    said = "none" if k1 is None else f"{kind}, {abs(k1):.1e} nats from the policy"
    found.add("reference", said)
    found.add(
        "update",
        f"loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.4f}, discarded"
        f"{_signal(record)}",
        ok=bool(np.isfinite(metrics["grad_norm"])),
    )


def _signal(record: StepRecord) -> str:
    if record.advantage is not None and not np.nan_to_num(record.advantage).any():
        return "; no group had two different rewards, so the advantages are 0"
    return ""


def _gold(run: Run) -> str:
    answer = run.asked.get("regrade")
    if not answer or answer.get("right_answers") is None:
        return ""
    return f", correct answers get {answer['right_answers']:.3f}"


def _any_reward(record: StepRecord) -> bool:
    return record.reward is not None and bool(np.isfinite(record.reward).any())


def _some(done: StepDone) -> Iterator[tuple[str, str, float]]:
    rewards = done.record.reward
    assert rewards is not None  # noqa: S101 - the step has rewards
    for rollout, reward in list(zip(done.rollouts, rewards, strict=True))[:SHOWN]:
        yield rollout.prompt.text, rollout.text, float(reward)


def _nan(run: Run, done: StepDone, found: Checked) -> None:
    """Inject an infinite advantage, and check that the update is discarded."""
    before = run.learner.publish().fingerprint
    advantage = np.array(done.record.advantage)
    advantage[0] = np.inf
    poisoned = replace(done.record, advantage=advantage)
    scored = run.learner.score(poisoned, needs_reference=False)
    prepared = run.learner.prepare(scored, kl_coef=0.0)
    run.learner.discard()
    same = run.learner.publish().fingerprint == before
    sites = [name for name, finite in prepared.finite_at.items() if not finite]
    found.add(
        "NaN handling",
        f"an infinite advantage makes {' and '.join(sites) or 'nothing'} non-finite; the update "
        f"is {'discarded' if same else 'applied'}",
        ok=same and bool(sites),
    )
