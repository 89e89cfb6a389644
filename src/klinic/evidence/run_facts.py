"""What holds for a whole run: the names of its files, run.json, and the texts of its tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.record import SCHEMA
from klinic.evidence.writing import write_atomically

RUN_FACTS = "run.json"
TOKENS = "tokens.json"
METRICS = "metrics.jsonl"
PROBES = "probes.jsonl"
EVENTS = "events.jsonl"
RECIPE = "recipe.yaml"
DIAGNOSIS = "diagnosis.json"  # what the live doctor named last
RECOVERY = "recovery.json"  # what was decided about trouble
STOPPED = "stopped"  # the event of a run that was asked to stop, saved and left
ENDED = "ended"  # the event of a run of another trainer whose training is over
LOCK = ".lock"  # held by the process that trains here
LONGEST_ID = 20  # digits
LARGEST_TOKENS, MOST_TOKENS = 1 << 24, 1 << 19  # bytes, entries; large vocabularies have half
SHARED = "shared with logp"  # what run.json says of `logp_old` where one forward serves both


def is_recorded(recipe: Path) -> bool:
    """Whether a recipe file is the one that a run folder holds, and not one that somebody keeps."""
    beside = (RUN_FACTS, METRICS, "records", "checkpoints")
    return recipe.name == RECIPE and any((recipe.parent / name).exists() for name in beside)


def write_run_facts(run: Path, facts: Mapping[str, Any]) -> None:
    """Write run.json, with the schema of this klinic. `fields.RUN_KEYS` lists the keys."""
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / RUN_FACTS, json_bytes({**facts, "schema": SCHEMA}) + b"\n")


def read_run_facts(run: Path) -> dict[str, Any]:
    """Return run.json; a schema newer than this klinic is refused."""
    facts = read_json(run / RUN_FACTS)
    schema = facts.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise EvidenceError(
            f"{run / RUN_FACTS}: `schema` is {schema!r}, so nothing says how to read the run. "
            f'Write "schema": {SCHEMA}.'
        )
    if schema > SCHEMA:
        raise EvidenceError(
            f"{run / RUN_FACTS}: has schema {schema}, but this klinic reads up to {SCHEMA}: fields "
            "may have changed their meaning. Update klinic."
        )
    return facts


def write_tokens(run: Path, texts: Mapping[int, str]) -> None:
    """Write tokens.json: the text of every token id, for people who read the findings."""
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / TOKENS, json_bytes(texts) + b"\n")


def read_tokens(run: Path) -> dict[int, str]:
    """Return tokens.json, or nothing where the run has none."""
    if not (run / TOKENS).exists():
        return {}
    texts = read_json(run / TOKENS, largest=LARGEST_TOKENS)
    if len(texts) > MOST_TOKENS:
        raise EvidenceError(
            f"{run / TOKENS}: names {len(texts):,} tokens, and klinic reads {MOST_TOKENS:,}. "
            "Delete it: only the words in findings need it."
        )
    if not all(
        key.isdecimal() and len(key) < LONGEST_ID and isinstance(text, str)
        for key, text in texts.items()
    ):
        raise EvidenceError(
            f"{run / TOKENS}: must map token ids to texts. Write it anew, or delete it: only the "
            "words in findings need it."
        )
    return {int(key): text for key, text in texts.items()}


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) < LONGEST_ID
