"""The plan of an ablation: every combination of the varied values, on the same seeds.

All settings share their seeds, so that paired runs see the same prompts and random numbers as far
as possible.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.run_facts import RECIPE
from klinic.evidence.writing import refuse_links_out, write_atomically
from klinic.recipe import aliases
from klinic.recipe.file import read_text
from klinic.recipe.loading import load_recipe

PLAN = "plan.json"
MONITOR_KL_EVERY = 5  # steps; measures the KL of runs with coefficient 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value for each varied key, as text."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The overrides of the setting.

        >>> Setting(values=(("kl.coef", "0.1"), ("model.lora_rank", "8"))).name
        'kl.coef=0.1 model.lora_rank=8'
        """
        return " ".join(f"{key}={value}" for key, value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting with a seed, from a start if there are several."""

    setting: Setting
    seed: int
    start: str | None = None
    """Override of the start, such as warm_start.seed=2."""

    @property
    def folder(self) -> str:
        """Path in the ablation's folder; sanitised, so that no value can escape it."""
        safe = re.sub(r"[^A-Za-z0-9_.=+-]", "_", self.setting.name.replace(" ", "__"))
        return f"{safe.lstrip('.')}/seed-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A recipe, the varied keys with their values, the starts and the number of seeds of each."""

    recipe: str
    """Text of the recipe file."""
    overrides: tuple[str, ...]
    vary: tuple[tuple[str, tuple[str, ...]], ...]
    seeds: int
    starts: tuple[str, ...] = ()
    """Overrides that change the initial weights, such as warm_start.seed=2."""

    def settings(self) -> list[Setting]:
        """Return all combinations, the last key fastest; the first one is the baseline."""
        choices = [[(key, value) for value in values] for key, values in self.vary]
        return [Setting(values=values) for values in itertools.product(*choices)]

    def trials(self) -> list[Trial]:
        """Return all trials, ordered by seed, then by setting.

        Each start has seeds of its own: shared ones would make starts depend on one another.
        """
        return [
            Trial(setting=setting, seed=number * self.seeds + seed, start=start)
            for number, start in enumerate(self.starts or (None,))
            for seed in range(1, self.seeds + 1)
            for setting in self.settings()
        ]

    @property
    def digest(self) -> str:
        """A short hash of the plan."""
        text = json.dumps(_plan_json(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def parse_vary(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse `key=a,b,c` to keys with their values; resolves aliases.

    >>> parse_vary(["kl_beta=0,0.01"])
    (('kl.coef', ('0', '0.01')),)
    """
    varied: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        key = aliases.canonical_name(name.strip())
        target = aliases.ALIASES.get(key, key)
        choices = tuple(value.strip() for value in values.split(","))
        if not equals or not all(choices) or len(set(choices)) != len(choices):
            raise ConfigError(
                f"--vary {text}: write a key and distinct values, such as kl.coef=0,0.01,0.1."
            )
        if not isinstance(target, str) or target == "seed" or target in varied:
            raise ConfigError(
                f"--vary {text}: {key} cannot be varied. Vary each recipe key once; use --seeds "
                "for seeds."
            )
        varied[target] = choices
    if not varied:
        raise ConfigError("nothing is varied. Add a key, such as --vary kl.coef=0,0.01,0.1.")
    return tuple(varied.items())


def parse_starts(text: str | None, varied: Sequence[str]) -> tuple[str, ...]:
    """Parse `key=a,b` to the overrides of the starts.

    >>> parse_starts("warm_start.seed=1,2", ["kl.coef"])
    ('warm_start.seed=1', 'warm_start.seed=2')
    """
    if text is None:
        return ()
    ((key, values),) = parse_vary([text])
    if key in varied:
        raise ConfigError(f"--starts {text}: {key} is varied. Name it in --vary or in --starts.")
    return tuple(f"{key}={value}" for value in values)


def make_plan(
    recipe: Path,
    overrides: Sequence[str],
    vary: Sequence[str],
    seeds: int,
    starts: str | None = None,
) -> Plan:
    """Build the plan of an ablation and validate all its recipes."""
    varied = parse_vary(vary)
    plan = Plan(
        recipe=read_text(recipe),
        overrides=tuple(overrides),
        vary=varied,
        seeds=seeds,
        starts=parse_starts(starts, [key for key, _ in varied]),
    )
    problems: dict[str, str] = {}
    for setting, start in itertools.product(plan.settings(), plan.starts or (None,)):
        try:
            load_recipe(recipe, setting_overrides(plan, setting, start))
        except ConfigError as error:
            problems[" ".join((setting.name, start or "")).strip()] = str(error)
    if problems:
        lines = "\n".join(f"{name}: {problem}" for name, problem in problems.items())
        num = len(plan.settings()) * max(1, len(plan.starts))
        raise ConfigError(f"{len(problems)} of {num} settings are not valid:\n{lines}")
    return plan


def setting_overrides(plan: Plan, setting: Setting, start: str | None = None) -> list[str]:
    """Return the recipe overrides of a setting and a start."""
    of_start = () if start is None else (start,)
    return [*plan.overrides, *(f"{key}={value}" for key, value in setting.values), *of_start]


def open_ablation(folder: Path, plan: Plan) -> None:
    """Create the folder of an ablation, or resume one with the same plan."""
    plan_path = folder / PLAN
    if plan_path.is_file():
        if read_json(plan_path) != _plan_json(plan):
            raise ConfigError(
                f"{folder} holds another ablation: its recipe, values or seeds differ. Use another "
                "--out, or the command that started it."
            )
        refuse_links_out(folder)
        # trials run this file, which may have been edited
        write_atomically(folder / RECIPE, plan.recipe.encode())
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no ablation. Use another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECIPE, plan.recipe.encode())
    write_atomically(plan_path, json_bytes(_plan_json(plan)))


def read_plan(folder: Path) -> Plan:
    """Read the plan from an ablation's folder."""
    content = read_json(folder / PLAN)
    return Plan(
        recipe=content["recipe"],
        overrides=tuple(content["overrides"]),
        vary=tuple((key, tuple(values)) for key, values in content["vary"]),
        seeds=content["seeds"],
        starts=tuple(content.get("starts", ())),
    )


def _plan_json(plan: Plan) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json_bytes(asdict(plan)))
    if not plan.starts:
        del plain["starts"]  # as in plans that were written without starts
    return plain
