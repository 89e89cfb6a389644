"""Other doctors of RL training on runs whose cause is known: what they say, and what is right.

    python -m bench.other_tools LOGS ... --python VENV/bin/python --out FOLDER
    python -m bench.other_tools --table FINDINGS

LOGS are folders of `bench.trl_scoreboard`, or of rebuilt reports (NAME.trl/trainer_state.json, with
klinic's run in NAME). The doctors are asked in an environment of their own, which has rldoctor,
rlwatch and rlprobe and nothing of klinic. FOLDER/findings.jsonl is all that was said, a line a run.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.ask_other_tools import EAGER, RIVALS
from bench.trl_logs import log_of

HEALTHY = "healthy"
SPEAKERS = ("klinic", *(how.format(name) for name in RIVALS for how in ("{}", EAGER)))
RIGHT = ("first", "later")
BOARD, REPORTS = "injected faults, 6 steps", "rebuilt reports, 10 to 50 steps"

# What a finding could mean, by what it is about. Generous: whoever read it might look there.
_MISMATCH = "stale-sampler samples-too-old temperature-on-one-side hidden-sampling-transform"
MEANINGS: Mapping[str, frozenset[str]] = {
    topic: frozenset(causes.split())
    for topic, causes in {
        "KL": "step-too-big kl-not-applied kl-sign-flipped kl-gradient-wrong kl-tail-dominates "
        "wrong-reference moved-reference misaligned-logp policy-does-not-move",
        "KL by position": "wrong-reference prompt-mismatch misaligned-logp retokenised",
        "entropy": "step-too-big equal-rewards reward-hacking broken-sampler random-weights "
        "temperature-on-one-side hidden-sampling-transform kl-not-applied kl-sign-flipped",
        "equal rewards": "equal-rewards broken-reward cliff-rewards malformed-output wrong-groups "
        "context-truncated",
        "reward": "reward-hacking broken-reward wrong-metric malformed-output",
        "no progress": "policy-does-not-move broken-reward step-too-big cliff-rewards "
        "equal-rewards stale-sampler",
        "length": "context-truncated stop-token-fault reward-hacking",
        "clipping": f"{_MISMATCH} step-too-big imprecise-logp misaligned-logp dropout-in-scoring "
        "layout-changes-logp routing-mismatch stale-prefix-cache",
        "advantages": "advantage-explodes wrong-groups broken-reward loss-scaled-wrong",
        "gradient": "advantage-explodes step-too-big loss-scaled-wrong nan-outside-mask "
        "equal-rewards policy-does-not-move",
        "not a number": "nan-outside-mask",
        "repetition": "broken-sampler step-too-big hidden-sampling-transform",
        "other": "",
    }.items()
}
TOPICS: Mapping[str, Mapping[str, str]] = {
    "rldoctor": {
        "kl_drift": "KL",
        "entropy_collapse": "entropy",
        "advantage_collapse": "equal rewards",
        "reward_hacking": "reward",
        "reward_composition": "reward",
        "plateau": "no progress",
        "length_pathology": "length",
        "clip_saturation": "clipping",
        "gradient_pathology": "gradient",
    },
    "rlwatch": {
        "kl_explosion": "KL",
        "entropy_collapse": "entropy",
        "reward_hacking": "reward",
        "reward_mean_drift": "reward",
        "advantage_variance": "advantages",
        "gradient_norm_spike": "gradient",
        "loss_nan": "not a number",
    },
    "rlprobe": {
        "KL_BLOWUP": "KL",
        "REF_POLICY_DRIFT_ASYMMETRY": "KL by position",
        "ENTROPY_COLLAPSE": "entropy",
        "DEGENERATE_GROUPS": "equal rewards",
        "REWARD_STD_DEATH": "equal rewards",
        "ADV_COLLAPSE": "equal rewards",
        "REWARD_HACK_LENGTH": "reward",
        "FORMAT_GAMING": "reward",
        "TRUNCATION_STARVE": "length",
        "CLIP_SATURATION": "clipping",
        "GRAD_PATHOLOGY": "gradient",
        "REPETITION_SPIRAL": "repetition",
        "VALUE_DIVERGENCE": "other",
        "THROUGHPUT_ROT": "other",
    },
}

# Rebuilt reports: causes that count as right, and what klinic named when it had not seen them.
TRUTHS: Mapping[str, tuple[str, str | None]] = {
    "huggingface_trl_5312": ("stale-sampler", None),
    "verl_project_verl_7270": ("hidden-sampling-transform", "hidden-sampling-transform"),
    "huggingface_trl_3000": ("dropout-in-scoring", "dropout-in-scoring"),
    "huggingface_trl_3194": ("wrong-reference", "wrong-reference"),
    "qiancheng0_toolrl_52": ("kl-sign-flipped", None),
    "allenai_open_instruct_530": ("kl-not-applied kl-gradient-wrong", None),
    "rllm_org_rllm_605": ("wrong-groups", "wrong-groups"),
    "liuziyu77_visual_rft_176": ("reward-hacking broken-reward", "step-too-big"),
    "greyhaven_ai_autocontext_1067": ("context-truncated equal-rewards", None),
    "nvidia_nemo_rl_4158": ("advantage-explodes", "advantage-explodes"),
    "unslothai_unsloth_5673": ("wrong-loss-mask", None),
    "huggingface_trl_7039": ("stop-token-fault wrong-loss-mask context-truncated", None),
    "jjyaoao_helloagents_107": ("step-too-big kl-not-applied", "equal-rewards"),
    "huggingface_open_r1_239": (HEALTHY, None),
}


def runs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of a folder that have a log: truth, what klinic named, and the log."""
    if not (folder / "outcomes.jsonl").exists():
        for name, (truth, named) in TRUTHS.items():
            log = folder / f"{name}.trl" / "trainer_state.json"
            said = [named] if named else []
            yield _run(REPORTS, name, truth.split(), said) | {"log": read(log, folder / name)}
        return
    for line in (folder / "outcomes.jsonl").read_text().splitlines():
        seen = json.loads(line)
        log = log_of(folder, **{key: seen[key] for key in ("cause", "name", "seed")})
        if log.exists():  # a run that ended in an exception has none
            name = f"{seen['cause']}/{log.parent.name}"
            said = seen["ranked"] if seen["named"] else []
            yield _run(BOARD, name, [seen["cause"]], said) | {"log": read(log)}


def _run(board: str, name: str, truth: list[str], klinic: list[str]) -> dict[str, Any]:
    said = {"klinic": [[cause] for cause in klinic]}
    return {"board": board, "run": name, "truth": truth, "said": said}


def read(log: Path, records: Path | None = None) -> dict[str, Any]:
    """Return TRL's log, with the KL where TRL logs none, and with advantages where recorded."""
    state = json.loads(log.read_text())
    for row in state["log_history"]:
        if "klinic/kl_k3/mean" in row:
            row.setdefault("kl", row["klinic/kl_k3/mean"])
        if records is not None and "loss" in row:
            row.update(_spread(records / "records" / f"step={row['step']:06}"))
        for key in [key for key in row if key.startswith("klinic/")]:
            del row[key]
    return state  # type: ignore[no-any-return]


def _spread(step: Path) -> dict[str, float]:
    from pyarrow import parquet

    columns = [parquet.read_table(p, columns=["advantage"])[0] for p in step.glob("*.parquet")]
    values = [value for column in columns for value in column.to_pylist()]
    return {"advantage_std": statistics.pstdev(values)} if values else {}


def causes_of(speaker: str, finding: str) -> frozenset[str]:
    """Return the causes that a finding could mean.

    >>> sorted(causes_of("rlwatch, eager", "loss_nan"))
    ['nan-outside-mask']
    """
    if speaker == "klinic":
        return frozenset([finding])
    return MEANINGS[TOPICS[speaker.partition(",")[0]][finding]]


def verdict(run: Mapping[str, Any], speaker: str) -> str:
    """Return `first`, `later`, `else` or `nothing`; of a healthy run, `alarm` or `silent`."""
    said = [causes_of(speaker, finding[0]) for finding in run["said"][speaker]]
    if HEALTHY in run["truth"]:
        return "alarm" if said else "silent"
    right = [bool(causes & set(run["truth"])) for causes in said]
    if not any(right):
        return "else" if said else "nothing"
    return "first" if right[0] else "later"


def summary(told: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Counter[str]]:
    """Return how often each verdict was right of each speaker on each board."""
    boards = dict.fromkeys(run["board"] for run in told)
    return {
        (board, speaker): Counter(verdict(run, speaker) for run in told if run["board"] == board)
        for board in boards
        for speaker in SPEAKERS
    }


def by_chance(told: Sequence[Mapping[str, Any]], speaker: str) -> float:
    """Return how many sick runs would be named right if their causes were those of others.

    It is high where a doctor finds much in every run, or where findings could mean much.
    """
    sick = [run for run in told if HEALTHY not in run["truth"]]
    rates = []
    for run in sick:
        others = [run | {"truth": o["truth"]} for o in sick if not {*o["truth"]} & {*run["truth"]}]
        rates.append(sum(verdict(o, speaker) in RIGHT for o in others) / max(len(others), 1))
    return sum(rates)


def table(told: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as a Markdown table; alarms are those in healthy runs."""
    head = ("runs", "doctor", "right", "by chance", "right first", "only else", "nothing", "alarms")
    lines = [head, ("---",) * len(head)]
    for (board, speaker), n in summary(told).items():
        sick = n["first"] + n["later"] + n["else"] + n["nothing"]
        right = f"{n['first'] + n['later']} of {sick}"
        alarms = f"{n['alarm']} of {n['alarm'] + n['silent']}"
        few = (str(n[key]) for key in ("first", "else", "nothing"))
        chance = f"{by_chance([run for run in told if run['board'] == board], speaker):.1f}"
        lines.append((board, speaker, right, chance, *few, alarms))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Ask the doctors about logs, or print what was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", type=Path, nargs="*")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    path = given.table or given.out / "findings.jsonl"
    if given.out:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in told_by(given.python, given.logs)))
    print(table([json.loads(line) for line in path.read_text().splitlines()]))  # noqa: T201


def told_by(python: str, folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield each run with what was said of it."""
    found = [run for folder in folders for run in runs(folder)]
    logs = "".join(json.dumps(run.pop("log")) + "\n" for run in found)
    done = subprocess.run(  # noqa: S603
        [python, "-m", "bench.ask_other_tools"],
        input=logs,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    for run, line in zip(found, done.stdout.splitlines(), strict=True):
        told = json.loads(line)
        yield run | {"said": run["said"] | told["said"], "versions": told["versions"]}


if __name__ == "__main__":
    main()
