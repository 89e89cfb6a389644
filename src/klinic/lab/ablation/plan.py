"""What an ablation runs: every combination of the varied values, on the same seeds.

All settings share their seeds, so that differences are between runs which saw the same prompts and
the same random numbers as far as they could.
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
from klinic.recipe.loading import load

PLAN = "plan.json"
WATCH_KL_EVERY = 5  # steps, where the coefficient is 0 and nothing else would look


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value for each key that is varied, as they were written."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """As overrides are written.

        >>> Setting(values=(("kl.coef", "0.1"), ("model.lora_rank", "8"))).name
        'kl.coef=0.1 model.lora_rank=8'
        """
        return " ".join(f"{key}={value}" for key, value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting on a seed."""

    setting: Setting
    seed: int

    @property
    def folder(self) -> str:
        """Where it lives in the ablation's folder; no value can lead out of there."""
        safe = re.sub(r"[^A-Za-z0-9_.=+-]", "_", self.setting.name.replace(" ", "__"))
        return f"{safe.lstrip('.')}/seed-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A recipe, what is varied in it, and over how many seeds."""

    recipe: str
    """The text of the file."""
    overrides: tuple[str, ...]
    vary: tuple[tuple[str, tuple[str, ...]], ...]
    seeds: int

    def settings(self) -> list[Setting]:
        """Return all combinations, the last key fastest; the first one is the baseline."""
        choices = [[(key, value) for value in values] for key, values in self.vary]
        return [Setting(values=values) for values in itertools.product(*choices)]

    def trials(self) -> list[Trial]:
        """Return all trials: a seed of every setting before a second seed of any."""
        seeds = range(1, self.seeds + 1)
        return [Trial(setting=s, seed=seed) for seed in seeds for s in self.settings()]

    @property
    def digest(self) -> str:
        """A short name, the same for the same plan."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_vary(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return keys with their values from `key=a,b,c`; familiar names of keys become klinic's own.

    >>> read_vary(["kl_beta=0,0.01"])
    (('kl.coef', ('0', '0.01')),)
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        key = aliases.canonical(name.strip())
        target = aliases.ALIASES.get(key, key)
        choices = tuple(value.strip() for value in values.split(","))
        if not equals or not all(choices) or len(set(choices)) != len(choices):
            raise ConfigError(
                f"--vary {text}: write a key and different values, such as kl.coef=0,0.01,0.1."
            )
        if not isinstance(target, str) or target == "seed" or target in found:
            raise ConfigError(
                f"--vary {text}: {key} cannot be varied here. Vary one key of the recipe, once; "
                "seeds are varied by --seeds."
            )
        found[target] = choices
    if not found:
        raise ConfigError("nothing is varied. Say what, such as --vary kl.coef=0,0.01,0.1.")
    return tuple(found.items())


def make_plan(recipe: Path, overrides: Sequence[str], vary: Sequence[str], seeds: int) -> Plan:
    """Return the plan of an ablation; every one of its recipes has been resolved."""
    plan = Plan(
        recipe=read_text(recipe), overrides=tuple(overrides), vary=read_vary(vary), seeds=seeds
    )
    problems: dict[str, str] = {}
    for setting in plan.settings():
        try:
            load(recipe, overrides_of(plan, setting))
        except ConfigError as error:
            problems[setting.name] = str(error)
    if problems:
        lines = "\n".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ConfigError(f"{len(problems)} of {len(plan.settings())} settings cannot be:\n{lines}")
    return plan


def overrides_of(plan: Plan, setting: Setting) -> list[str]:
    """Return the overrides that make a setting of the recipe."""
    return [*plan.overrides, *(f"{key}={value}" for key, value in setting.values)]


def open_ablation(folder: Path, plan: Plan) -> None:
    """Make the folder of an ablation, or go on with the one that is there if it is the same."""
    place = folder / PLAN
    if place.is_file():
        if read_json(place) != _plain(plan):
            raise ConfigError(
                f"{folder} holds another ablation: its recipe, values or seeds differ. Give "
                "another --out, or the command that it was started with."
            )
        refuse_links_out(folder)
        # the trials run it, and it may have changed since
        write_atomically(folder / RECIPE, plan.recipe.encode())
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no ablation. Give another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECIPE, plan.recipe.encode())
    write_atomically(place, json_bytes(_plain(plan)))


def read_plan(folder: Path) -> Plan:
    """Return the plan of an ablation's folder."""
    found = read_json(folder / PLAN)
    return Plan(
        recipe=found["recipe"],
        overrides=tuple(found["overrides"]),
        vary=tuple((key, tuple(values)) for key, values in found["vary"]),
        seeds=found["seeds"],
    )


def _plain(plan: Plan) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json_bytes(asdict(plan)))
    return plain
