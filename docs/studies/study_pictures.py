"""Draw the pictures of the studies: `python docs/studies/study_pictures.py` (`klinic[plot]`)."""

import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from klinic.lab.ablation.comparison import setting_rows, skill_measure_name
from klinic.lab.ablation.plots import write_plots

HERE = Path(__file__).parent


def draw(study: Path) -> None:
    """Draw a study from its recorded trials and steps."""
    trials = pq.read_table(study / "trials.parquet").to_pylist()
    steps = pq.read_table(study / "steps.parquet").to_pylist()
    seeds: dict[str, list[int]] = {}
    for trial in trials:
        seeds.setdefault(trial["setting"], []).append(trial["seed"])
    curves = {
        setting: [
            [
                {name: value for name, value in step.items() if isinstance(value, (int, float))}
                for step in steps
                if (step["setting"], step["seed"]) == (setting, seed)
            ]
            for seed in own
        ]
        for setting, own in seeds.items()
    }
    table = setting_rows(trials, list(seeds), next(iter(seeds)))
    with tempfile.TemporaryDirectory() as folder:
        write_plots(Path(folder), table, curves, skill_measure_name(trials))
        for name in ("curves.png", "trade_off.png"):
            shutil.copy(Path(folder) / name, study / name)


if __name__ == "__main__":
    for name in ("coefficient", "estimators", "chess"):
        draw(HERE / name)
