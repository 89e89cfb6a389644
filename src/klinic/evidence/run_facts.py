"""File names of a run folder, and run.json and tokens.json: the facts of the whole run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.errors import EvidenceError
from klinic.evidence.end_texts import find_end_like_ids
from klinic.evidence.files import json_bytes, parse_object, read_bytes, read_json
from klinic.evidence.schema_version import SCHEMA
from klinic.evidence.writing import write_atomically

if TYPE_CHECKING:
    from klinic.recipe.recipe import Recipe

RUN_FACTS = "run.json"
TOKENS = "tokens.json"
METRICS = "metrics.jsonl"
PROBES = "probes.jsonl"
EVENTS = "events.jsonl"
RECIPE = "recipe.yaml"
DIAGNOSIS = "diagnosis.json"  # the latest diagnosis of the live doctor
RECOVERY = "recovery.json"  # the recovery plan
PROOF = "proof.json"  # the last replay that `diagnose --prove` made
STOPPED = "stopped"  # the event of a run that saved and exited on a stop signal
ENDED = "ended"  # the event of a finished run of another trainer
TENSORBOARD = "tensorboard"
LOCK = ".lock"  # held by the training process
LONGEST_ID = 20  # digits
LARGEST_TOKENS, MOST_TOKENS = 1 << 24, 1 << 19  # bytes, entries; large vocabularies have half
SHARED_FORWARD = "shared with logp"  # `logp_old` of run.json if one forward pass serves both


def display_path(folder: Path, recipe: "Recipe") -> Path:
    """Return the run folder as the recipe names it, so that records hold no machine-specific path.

    Valid only while the working directory is the one in which the run started.
    """
    chosen = recipe.output.dir
    if chosen is not None and Path(chosen).expanduser().is_absolute():
        return folder
    return Path(os.path.relpath(folder))


def is_run_recipe(recipe: Path) -> bool:
    """Whether a recipe file is the copy in a run folder, and not a user's own file."""
    beside = (RUN_FACTS, METRICS, "records", "checkpoints")
    return recipe.name == RECIPE and any((recipe.parent / name).exists() for name in beside)


def write_run_facts(run: Path, facts: Mapping[str, Any]) -> None:
    """Write run.json with the current schema. `fields.RUN_KEYS` lists the keys."""
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / RUN_FACTS, json_bytes({**facts, "schema": SCHEMA}) + b"\n")


def read_run_facts(run: Path) -> dict[str, Any]:
    """Return run.json; raise `EvidenceError` if its schema is missing or newer."""
    facts = read_json(run / RUN_FACTS)
    schema = facts.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise EvidenceError(
            f"{run / RUN_FACTS}: `schema` is {schema!r}, so the format of the run is unknown. "
            f'Write "schema": {SCHEMA}.'
        )
    if schema > SCHEMA:
        raise EvidenceError(
            f"{run / RUN_FACTS}: has schema {schema}, but this klinic reads up to {SCHEMA}: fields "
            "may have changed their meaning. Update klinic."
        )
    return facts


def end_like_facts(texts: Mapping[int, str]) -> dict[str, Any]:
    """Return the entry of run.json that follows from the token texts; empty without texts."""
    return {"end_like_ids": find_end_like_ids(texts)} if texts else {}


def write_tokens(run: Path, texts: Mapping[int, str]) -> None:
    """Write tokens.json: the text of every token id, shown in findings."""
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / TOKENS, json_bytes(texts) + b"\n")


def read_tokens(run: Path) -> dict[int, str]:
    """Return tokens.json; an empty dict if the run has none."""
    if not (run / TOKENS).exists():
        return {}
    data = read_bytes(run / TOKENS, largest=LARGEST_TOKENS)
    # before parsing, which takes ten times the memory; a quote within a text counts too
    if data.count(b'":') > MOST_TOKENS:
        raise EvidenceError(
            f"{run / TOKENS}: names more than {MOST_TOKENS:,} tokens, the limit. "
            "Delete it: findings then show token ids instead of texts."
        )
    texts = parse_object(data, run / TOKENS)
    if not all(
        key.isdecimal() and len(key) < LONGEST_ID and isinstance(text, str)
        for key, text in texts.items()
    ):
        raise EvidenceError(
            f"{run / TOKENS}: must map token ids to texts. Write it again, or delete it: "
            "findings then show token ids instead of texts."
        )
    return {int(key): text for key, text in texts.items()}


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) < LONGEST_ID
