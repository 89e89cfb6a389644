"""Scalar logs as tables and printed text, each with the entries of a run of TRL.

`EXACT` formats keep every digit and the steps; `CONSOLES` are printed, rounded, by other trainers.
"""

import csv
import json
import sqlite3

from foreign_logs import write_lines, write_trainer_state


def write_table(path, rows):
    header = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_chart(path, entries, metric, run="run-1"):
    """Write the CSV of a W&B chart: bounds of each point beside its value."""
    rows = [
        {"Step": e["step"], f"{run} - train/{metric}": e[metric]}
        | {f"{run} - train/{metric}__MIN": e[metric] - 1, f"{run} - train/{metric}__MAX": 9e9}
        for e in entries
    ]
    return write_table(path, rows)


def write_charts(folder, entries):
    for metric in ("kl", "reward", "loss"):
        write_chart(folder / f"wandb_{metric}.csv", entries, metric)
    return folder


def write_long_table(path, entries):
    """Write the CSV that a metrics page of MLflow downloads."""
    rows = [
        {"run_id": "r", "key": key, "value": e[key], "step": e["step"], "timestamp": 1}
        for e in entries
        for key in e
        if key != "step"
    ]
    return write_table(path, rows)


def write_trackio(path, entries, *, wal=False):
    database = sqlite3.connect(path)
    if wal:
        database.execute("PRAGMA journal_mode=WAL")
    database.execute(
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, "
        "timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL, "
        "metrics TEXT NOT NULL)"
    )
    older = [("a", "t", "older", 1, '{"kl": 77.0, "reward": 1.0}')]
    rows = [
        ("b", "t", "newer", e["step"], json.dumps({f"train/{k}": v for k, v in e.items()}))
        for e in entries
    ]
    database.executemany(
        "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?,?,?,?,?)",
        older + rows,
    )
    database.commit()
    database.close()
    return path


def write_mlflow(folder, entries):
    run = folder / "mlruns" / "0" / "abc"
    for name in (name for name in entries[0] if name != "step"):
        path = run / "metrics" / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"17000 {e[name]} {e['step']}\n" for e in entries))
    (run / "meta.yaml").write_text("run_id: abc\n")
    (run.parent / "meta.yaml").write_text("experiment_id: 0\n")
    return folder


def write_text(path, lines):
    path.write_text("".join(lines))
    return path


def printed_dicts(entries):
    """Return what transformers prints: texts of numbers, and no step."""
    return [str({k: f"{v:.6g}" for k, v in e.items() if k != "step"}) + "\n" for e in entries]


def dicts_behind_bars(entries):
    """Return printed dicts, each behind the progress bar of ten more steps."""
    return [
        f"\r 3%|#| {10 * n}/300 [00:01<01:00]{line}"
        for n, line in enumerate(printed_dicts(entries), 1)
    ]


def slime_console(entries):
    return [f"(pid=3) INFO step {e['step']}: {e}\n" for e in entries]


def own_loop(entries):
    return [
        f"step {e['step']} | loss {e['loss']:.17g} | kl {e['kl']!r} | reward {e['reward']!r}\n"
        for e in entries
    ]


def verl_console(entries):
    return [
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{e['step']} - "
        f"actor/kl_loss:np.float64({e['kl']!r}) - critic/score/mean:{e['reward']!r} - "
        "actor/pg_clipfrac:0.0 - timing_s/gen:3.2\n"
        for e in entries
    ]


def prime_rl_console(entries):
    return [
        f"12:00:00 SUCCESS Step {e['step']} |  10.2s | Loss {e['loss']:.4f} | Entropy 0.5000 | "
        f"Mismatch KL {e['kl']:.4f} | Grad. Norm 0.1000 | LR 1.00e-06 | MFU 30.1%\n"
        for e in entries
    ]


def nemo_rl_console(entries):
    return [
        f"========================= Step {e['step']}/30 =========================\n"
        f"Training Results:\n  • Loss: {e['loss']:.4f}\n  • Generation KL Error: 0.0123\n"
        f"  • Avg Reward: {e['reward']:.4f}\n"
        for e in entries
    ]


EXACT = {
    "trainer state": lambda folder, entries: write_trainer_state(
        folder / "trainer_state.json", entries
    ),
    "json lines": lambda folder, entries: write_lines(folder / "log.jsonl", entries),
    "wide csv": lambda folder, entries: write_table(folder / "log.csv", entries),
    "charts": write_charts,
    "long csv": lambda folder, entries: write_long_table(folder / "metrics.csv", entries),
    "json list": lambda folder, entries: write_text(folder / "log.json", [json.dumps(entries)]),
    "json columns": lambda folder, entries: write_text(
        folder / "log.json", [json.dumps({k: [e[k] for e in entries] for k in entries[0]})]
    ),
    "trackio": lambda folder, entries: write_trackio(folder / "project.db", entries),
    "trackio wal": lambda folder, entries: write_trackio(folder / "project.db", entries, wal=True),
    "trackio folder": lambda folder, entries: write_trackio(folder / "project.db", entries).parent,
    "mlflow": write_mlflow,
    "slime console": lambda folder, entries: write_text(folder / "a.log", slime_console(entries)),
    "own loop": lambda folder, entries: write_text(folder / "nohup.out", own_loop(entries)),
    "verl console": lambda folder, entries: write_text(folder / "out.txt", verl_console(entries)),
}
CONSOLES = {
    "printed dicts": lambda folder, entries: write_text(
        folder / "train.log", printed_dicts(entries)
    ),
    "dicts and bars": lambda folder, entries: write_text(
        folder / "bar.log", dicts_behind_bars(entries)
    ),
    "prime-rl console": lambda folder, entries: write_text(
        folder / "trainer.log", prime_rl_console(entries)
    ),
    "nemo-rl console": lambda folder, entries: write_text(
        folder / "driver.log", nemo_rl_console(entries)
    ),
}
