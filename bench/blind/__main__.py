"""`python -m bench.blind SET FOLDER`: run a blind set, diagnose and count.

`round2` and `round4` train two start policies and some 55 scripts (about 12 minutes on one core);
`threads` and `trainers` write the files of 38 and 36 cases (about 6 minutes each). What is in
FOLDER already is not made again. The doctor is on as for a user, so its probes run;
`BLIND_DOCTOR=none` is what the first runs had.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.blind.scoring import judge, summary

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "recipes" / "arithmetic.yaml"
STARTS = {
    "full": ("loop.eval_prompts=64",),
    "early": ("loop.eval_prompts=8", "warm_start.steps=250", "warm_start.batch_size=32"),
}
OF_FILES = ("threads", "trainers")
"""The sets that are files in the formats of other trainers."""
KLINIC = [sys.executable, "-m", "klinic.cli"]


def main() -> None:
    """Run a set and print the verdict of each case and the counts."""
    parser = argparse.ArgumentParser(prog="python -m bench.blind", description=__doc__)
    parser.add_argument("name", choices=["round2", "round4", *OF_FILES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="cases, such as trl/s01 or 07")
    given = parser.parse_args()
    folder = given.folder.resolve()
    names = json.loads((HERE / given.name / "mapping.json").read_text())
    cases = [case for case in names if not given.only or case in given.only]
    make = _write if given.name in OF_FILES else _train
    made = make(given.name, folder, cases)
    verdicts = []
    for case, run in made:
        verdicts.append(judge(case, names[case], _diagnose(run)))
        print(json.dumps(asdict(verdicts[-1])), flush=True)  # noqa: T201
    print(json.dumps(summary(verdicts)))  # noqa: T201


def _train(name_of_set: str, folder: Path, cases: list[str]) -> Iterator[tuple[str, Path]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["BLIND_OUT"] = str(folder)
    env.setdefault("BLIND_DOCTOR", "tell")  # as for a user: only then do the probes run
    for name, settings in STARTS.items():
        start = folder / "start" / name
        if not start.exists():
            train = [*KLINIC, "train", str(RECIPE), "loop.max_steps=1", *settings]
            subprocess.run([*train, f"output.dir={start}"], check=True, env=env)  # noqa: S603
        env[f"BLIND_{name.upper()}"] = str(start / "start")
    for case in cases:
        owner, _, name = case.partition("/")
        script, run = HERE / name_of_set / owner / "cases" / f"{name}.py", folder / case
        if not run.exists():
            run.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(  # noqa: S603
                [sys.executable, str(script), str(run)], check=True, cwd=script.parent, env=env
            )
        yield case, run


def _write(name_of_set: str, folder: Path, cases: list[str]) -> Iterator[tuple[str, Path]]:
    for case in cases:
        run = folder / "cases" / case
        if not run.exists():
            script = HERE / name_of_set / "scripts" / f"{case}.py"
            env = {**os.environ, "BLIND_OUT": str(folder)}
            subprocess.run([sys.executable, str(script)], check=True, env=env)  # noqa: S603
        yield case, _converted(run)


def _converted(run: Path) -> Path:
    """Return the folder, or what `klinic convert` makes of files in torch's format, as it asks."""
    if not any(run.glob("**/*.pt")):
        return run
    out = run.with_name(f"{run.name}-converted")
    if not out.exists():
        subprocess.run([*KLINIC, "convert", str(run), str(out)], check=True)  # noqa: S603
    return out


def _diagnose(run: Path) -> dict[str, object]:
    done = subprocess.run(  # noqa: S603
        [*KLINIC, "diagnose", str(run), "--json"], capture_output=True, text=True, check=False
    )
    found: dict[str, object] = json.loads(done.stdout) if done.stdout else {}
    return found


if __name__ == "__main__":
    main()
