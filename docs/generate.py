"""The pages that repeat the source, made from it: `python docs/generate.py` writes them again.

A page is text by hand with tables between `<!-- table: NAME -->` and `<!-- end -->`; a test fails
where a table is not what the source says.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow.parquet as pq
import python_api
import typer

from klinic.checks import CHECKS
from klinic.cli.app import app
from klinic.cli.explain import markdown_sections
from klinic.cli.help_page import EXAMPLES as COMMAND_LINES
from klinic.cli.help_page import parameter_rows
from klinic.cli.words import WORDS
from klinic.doctor.recorder import Recorder
from klinic.doctor.recorder_settings import RecorderSettings
from klinic.doctor.scalars.examine import SIGNS
from klinic.evidence.metric_meanings import METRIC_MEANINGS
from klinic.evidence.readers.names import KLINIC, TRAINERS
from klinic.lab.ablation.comparison import (
    Question,
    Result,
    SettingRow,
    correct_p_values,
    num_tests,
    setting_rows,
)
from klinic.lab.ablation.intervals import Difference, Interval
from klinic.lab.ablation.starts import describe_sample
from klinic.lab.ablation.verdict import recommend_setting, summary_lines
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe.aliases import ALIASES, REFUSED, resolve_alias
from klinic.recipe.section import Section
from klinic.recipe.sections import KLSection, RecoverySection

DOCS = Path(__file__).parent
FAR_MARGIN = 0.05  # nats per token, of the plan of this study
EXAMPLES: dict[str, Any] = {
    "vllm_enable_sleep_mode": True,
    "free_cache_engine": True,
    "vllm_importance_sampling_correction": True,
    "rollout_is": "sequence",
    "tis_imp_ratio_cap": 2.0,
    "truncated_importance_sampling_ratio": 2.0,
    "use_cpu": True,
    "flash_attn": True,
    "flash_attention": True,
    "no_cuda": True,  # of the names whose meaning depends on the value
    "bf16": True,
    "clip_range": 0.2,
    "cliprange": 0.2,
    "cluster.learners": 2,
    "dynamic_sampling": True,
    "epsilon": 0.2,
    "kl_penalty": 0.01,
    "kl_target": 0.05,
    "report_to": "wandb",
    "target_kl": 0.05,
    "use_kl_loss": False,
    "use_kl_penalty": True,
    "use_vllm": True,
    "vllm_server_base_url": "http://127.0.0.1:8000",
}
RECORDER_OUTPUT = {
    "folder": "Run folder, new or empty.",
    "token_texts": "Text of each token id, such as `{5: 'the'}`: findings then show texts.",
    "doctor": "`tell`: print a cause when it is found; `stop`: raise `RunStoppedError` as well, if "
    "the cause is certain; `none`: record only.",
    "processes": "Connects the recorders of several processes, such as `klinic.TorchProcesses()`; "
    "None: one process.",
    "console": "A rich console to print to; None: the terminal.",
}
MEASURED = ("accuracy", "retention", "KL per token")
LARGEST = (("kl_max", 2), ("grad_norm_max", 1))  # with their digits
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> str:
    """Return every command with its arguments and options, by the groups of `klinic --help`."""
    every: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines: list[str] = []
    for panel in dict.fromkeys(command.rich_help_panel for command in every.values()):
        lines += [f"## {panel}", ""]
        for name, command in every.items():
            if command.rich_help_panel == panel:
                lines += [f"### klinic {name}", "", command.help, ""]
                lines += [*table(("", "meaning"), parameters(command, name)), ""]
                lines += [
                    "```sh",
                    *(f"{line}  # {why}" for line, why in COMMAND_LINES[name]),
                    "```",
                    "",
                ]
    return "\n".join(lines)


def parameters(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield what a command takes, as its own help says it."""
    context = command.context_class(command, info_name=name)
    for label, text in parameter_rows(command, context):
        yield f"`{label}`", text


def estimators() -> str:
    """Return every KL term with the gradient that its name promises."""
    rows = (
        (f"`{e.name}`", e.kind, f"`{e.gradient.value}`", e.sentence) for e in ESTIMATORS.values()
    )
    return "\n".join([*table(("estimator", "kind", "gradient", "what to know"), rows), ""])


def checks() -> str:
    """Return every cause in one line, with the stage at which it is looked for."""
    rows = (
        (
            f"[{c.name}](#{c.name})",
            c.stage.name.lower().replace("_", " "),
            c.help_text.splitlines()[0],
        )
        for c in CHECKS
    )
    return "\n".join([*table(("cause", "stage", "what the check does"), rows), ""])


def cause_fields() -> str:
    """Return every cause with the fields that distinguish it from the others."""
    rows = (
        (
            f"`{c.name}`",
            c.description,
            listed(c.all_fields),
            c.not_recorded,
        )
        for c in CHECKS
    )
    return "\n".join([*table(("cause", "fault", "fields", "not recorded"), rows), ""])


def signs() -> str:
    """Return what scalars can show, and what would tell more."""
    rows = (
        (f"`{s.name}`", s.text.removeprefix("Look for ").rstrip("."), listed(s.decided_by))
        for s in SIGNS
    )
    return "\n".join([*table(("sign", "looks for", "its causes are told apart by"), rows), ""])


def names() -> str:
    """Return a table per trainer: klinic's metric, and the trainer's names for it."""
    sections: list[str] = []
    for trainer in (t for t in TRAINERS if t is not KLINIC):
        own = dict.fromkeys(trainer.names.values())
        rows = (
            (f"`{name}`", listed(k for k, v in trainer.names.items() if v == name)) for name in own
        )
        sections += [f"### Names of {trainer.name}", "", f"Read in {trainer.source}.", ""]
        sections += [*table(("klinic", trainer.name), rows), ""]
    return "\n".join(sections)


def listed(words: Iterable[str]) -> str:
    """Return words as a table has them."""
    return ", ".join(f"`{word}`" for word in words)


def metrics() -> str:
    """Return every metric with its unit and its meaning."""
    rows = ((listed(m.names), m.unit, m.meaning) for m in METRIC_MEANINGS)
    return "\n".join([*table(("metric", "unit", "meaning"), rows), ""])


def words() -> str:
    """Return the words of `klinic explain` with their answers."""
    rows = ((", ".join(sought), answer) for sought, answer in WORDS.items())
    return "\n".join([*table(("word", "answer"), rows), ""])


def aliases() -> str:
    """Return the names of other trainers, and what each is here."""
    rows = sorted((written_as(name), said(name)) for name in ALIASES)
    return "\n".join([*table(("you write", "klinic writes"), iter(rows)), ""])


def written_as(name: str) -> str:
    """Return a familiar name, with a value where the meaning depends on it."""
    return f"`{name}: {shown(EXAMPLES[name])}`" if callable(ALIASES[name]) else f"`{name}`"


def said(name: str) -> str:
    """Return the keys that a familiar name sets."""
    target = ALIASES[name]
    if isinstance(target, str):
        return f"`{target}`"
    means = resolve_alias(name, EXAMPLES[name])
    sets = [f"`{key}: {shown(value)}`" for key, value in means.sets.items()]
    weaker = {**means.unless_explicit, **means.unless_set}
    sets += [f"`{key}: {shown(value)}` unless you say otherwise" for key, value in weaker.items()]
    return ", ".join(sets)


def shown(value: Any) -> str:
    """Return a value as a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value)


def refused() -> str:
    """Return the names that have no counterpart, with what to set instead."""
    return "\n".join(
        [*table(("you write", "do this"), ((f"`{n}`", why) for n, why in REFUSED.items())), ""]
    )


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    """Return a table in Markdown."""
    cells = [heads, ("---",) * len(heads), *rows]
    return ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in cells]


def escaped(cell: str) -> str:
    """Return text that stays in its cell."""
    return cell.replace("|", r"\|")


def study(name: str) -> list[Result]:
    """Return the recorded trials of a study."""
    return list(pq.read_table(DOCS / "studies" / name / "trials.parquet").to_pylist())


def compared(trials: list[Result]) -> list[SettingRow]:
    """Return the rows of a study, compared with its first setting."""
    settings = list(dict.fromkeys(trial["setting"] for trial in trials))
    return setting_rows(trials, settings, settings[0])


def study_coefficient() -> str:
    """Return the coefficients with their differences to 0, and the verdict of `klinic ablate`."""
    rows = compared(study("coefficient"))
    measures = ("accuracy", "retention", "kl_token")
    heads = ("coefficient", *MEASURED, *(f"{name} to 0" for name in MEASURED))
    cells = (
        (
            row.setting.partition("=")[2],
            *(spread(row.means[m]) for m in measures),
            *(tested(row.differences.get(m)) for m in measures),
        )
        for row in rows
    )
    verdict = recommend_setting(rows, "accuracy")
    lines = ["", "```", *summary_lines(rows, verdict), "", verdict.says, "```", ""]
    return "\n".join([*table(heads, cells), *lines])


def study_estimators() -> str:
    """Return the estimators with their differences to `unbiased` at the same coefficient."""
    trials = study("estimators")
    heads = ("estimator", "coefficient", *MEASURED, "KL to `unbiased`", "max KL", "max grad norm")
    cells = (
        (
            *named(row.setting),
            *(spread(row.means[m]) for m in ("accuracy", "retention", "kl_token")),
            tested(row.differences.get("kl_token")),
            *(f"{largest(trials, row.setting, m):.{d}f}" for m, d in LARGEST),
        )
        for row in compared_estimators()
    )
    return "\n".join([*table(heads, cells), ""])


def compared_estimators() -> list[SettingRow]:
    """Return the estimators, compared at each coefficient and corrected for both together."""
    trials = study("estimators")
    at_both = (at_coefficient(trials, coefficient) for coefficient in ("0.1", "1.0"))
    return correct_p_values([row for own in at_both for row in compared(own)])


def at_coefficient(trials: list[Result], coefficient: str) -> list[Result]:
    """Return the trials with this coefficient."""
    return [trial for trial in trials if trial["setting"].endswith(f"kl.coef={coefficient}")]


def largest(trials: list[Result], setting: str, measure: str) -> float:
    """Return the largest value of any seed."""
    return float(max(trial[measure] for trial in trials if trial["setting"] == setting))


def study_lora() -> str:
    """Return adapters and full fine-tuning, compared with full fine-tuning at 1e-4."""
    rows = compared(study("lora"))
    heads = ("weights", "learning rate", "seeds", *MEASURED, "accuracy to the first", "KL to it")
    cells = (
        (
            *named(row.setting),
            str(len(row.seeds)),
            *(spread(row.means[m]) for m in ("accuracy", "retention", "kl_token")),
            *(tested(row.differences.get(m)) for m in ("accuracy", "kl_token")),
        )
        for row in rows
    )
    return "\n".join([*table(heads, cells), ""])


def study_far() -> str:
    """Return the estimators far from the reference, with the one tested outcome."""
    trials = study("far")
    settings = list(dict.fromkeys(trial["setting"] for trial in trials))
    question = Question(outcome="kl_token", margin=FAR_MARGIN)
    rows = setting_rows(trials, settings, settings[0], question)
    within = f"equivalent within {FAR_MARGIN}"
    heads = ("estimator", *MEASURED, "KL to `unbiased`", within, "max KL")
    cells = (
        (
            named(f"{row.setting} kl.coef=0.5")[0],
            *(spread(row.means[m]) for m in ("accuracy", "retention", "kl_token")),
            tested(row.differences.get("kl_token")),
            equivalence(row.differences.get("kl_token")),
            f"{largest(trials, row.setting, 'kl_max'):.1f}",
        )
        for row in rows
    )
    sample = describe_sample(trials)
    says = recommend_setting(rows, "accuracy", question, sample).says
    return "\n".join([*table(heads, cells), "", "```", says, "```", ""])


def equivalence(difference: Difference | None) -> str:
    """Return the corrected p-value of the test of equivalence."""
    if difference is None:
        return ""
    p_value = difference.p_outside_corrected
    return f"{'yes' if p_value < 0.05 else 'not shown'} (p {p_value:.2g})"


def study_tests() -> str:
    """Return how many tests the marks of each study are corrected for."""
    rows = {
        "(a)": compared(study("coefficient")),
        "(b)": compared_estimators(),
        "(c)": compared(study("lora")),
        "(d)": compared(study("chess")),
    }
    counts = ", ".join(f"{label} {num_tests(found)}" for label, found in rows.items())
    return f"Tests that each study is corrected for: {counts}.\n"


def ablate_example() -> str:
    """Return the closing lines of an ablation over the first three seeds of the study."""
    trials = [
        trial
        for trial in study("coefficient")
        if trial["seed"] <= 3 and trial["setting"] != "kl.coef=1.0"
    ]
    rows = compared(trials)
    verdict = recommend_setting(rows, "accuracy")
    return "\n".join(["```", *summary_lines(rows, verdict), "", verdict.says, "```", ""])


def named(setting: str) -> tuple[str, ...]:
    """Return the values of a setting, as a reader says them."""
    words = {"null": "all", "16": "LoRA of rank 16"}
    values = [pair.partition("=")[2] for pair in setting.split(" ")]
    return tuple(words.get(v, f"`{v}`" if v in ESTIMATORS else v) for v in values)


def spread(value: Interval) -> str:
    """Return a mean with half of its interval."""
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def tested(value: Difference | None) -> str:
    """Return a difference with its interval, in bold if it is beyond noise."""
    if value is None:
        return ""
    text = f"{value.mean:+.3f} ({value.low:+.3f} to {value.high:+.3f})"
    return f"**{text}**" if value.is_significant else text


def coefficients_short() -> str:
    """Return three coefficients of the study, for the tutorial."""
    heads = ("coefficient", "accuracy (start 0.570)", "retention of other skills", "KL per token")
    cells = (
        (
            row.setting.partition("=")[2],
            *(spread(row.means[m]) for m in ("accuracy", "retention", "kl_token")),
        )
        for row in compared(study("coefficient"))
        if row.setting in {"kl.coef=0", "kl.coef=0.1", "kl.coef=1.0"}
    )
    return "\n".join([*table(heads, cells), ""])


def coefficients_kl() -> str:
    """Return the KL at the end of two studies, by coefficient."""
    heads = ("coefficient", "arithmetic, 250 steps, 5 seeds", "chess, 60 steps, 2 seeds: each")
    chess = study("chess")
    cells = (
        (
            row.setting.partition("=")[2],
            spread(row.means["kl_token"]),
            ", ".join(f"{t['kl_token']:.3f}" for t in chess if t["setting"] == row.setting),
        )
        for row in compared(study("coefficient"))
        if row.setting != "kl.coef=0.001"
    )
    return "\n".join([*table(heads, cells), ""])


def cause_sections() -> str:
    """Return what `klinic explain --all` prints."""
    return markdown_sections(CHECKS).strip() + "\n"


def recorder_settings() -> str:
    """Return every argument of `klinic.Recorder`, in the order of its signature."""
    described = {n: setting_text(f) for n, f in RecorderSettings.model_fields.items()}
    described |= RECORDER_OUTPUT
    rows = (
        (f"`{name}`", default_text(parameter.default), " ".join(described[name].split()))
        for name, parameter in inspect.signature(Recorder).parameters.items()
    )
    return "\n".join([*table(("argument", "default", "meaning"), rows), ""])


def setting_text(field: Any) -> str:
    """Return the description of a setting, with the offered names that it does not explain."""
    text = field.description or ""
    offered = [word for kind in get_args(field.annotation) for word in offered_names(kind)]
    if offered and not all(f"`{word}`" in text for word in offered):
        text += f" One of {listed(offered)}."
    return text


def offered_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a literal type; empty for another."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def default_text(default: Any) -> str:
    """Return a default as the table shows it."""
    if default is inspect.Parameter.empty:
        return "required"
    return "None" if default is None else f"`{default}`"


def function_page(name: str) -> str:
    """Return what a public function does, its arguments and its result."""
    rows = table(("argument", "default", "meaning"), python_api.arguments(name))
    result = f"Returns: {python_api.returns(name)}"
    return "\n".join([python_api.introduction(name), "", *rows, "", result, ""])


def class_members(name: str) -> str:
    """Return the attributes and methods of a public class."""
    rows = python_api.members(python_api.public(name))
    return "\n".join([*table(("name", "meaning"), rows), ""])


def section_keys(kind: type[Section]) -> str:
    """Return the keys of a section of a recipe."""
    return "\n".join([*table(("key", "default", "meaning"), python_api.keys(kind)), ""])


TABLES: dict[str, Callable[[], str]] = {
    "python-train": lambda: function_page("train"),
    "python-attach": lambda: function_page("attach"),
    "python-result": lambda: class_members("Result"),
    "python-kl": lambda: section_keys(KLSection),
    "python-recovery": lambda: section_keys(RecoverySection),
    "python-rewards": lambda: "\n".join(
        [*table(("name", "meaning"), python_api.reward_tools()), ""]
    ),
    "python-events": lambda: "\n".join([*table(("event", ""), python_api.events()), ""]),
    "python-unused": lambda: "\n".join(
        [*table(("argument", "why it has no effect"), python_api.unused()), ""]
    ),
    "python-unavailable": lambda: "\n".join(
        [*table(("argument", "reason, or what to do"), python_api.unavailable()), ""]
    ),
    "recorder-settings": recorder_settings,
    "commands": commands,
    "estimators": estimators,
    "checks": checks,
    "cause-fields": cause_fields,
    "cause-sections": cause_sections,
    "signs": signs,
    "names": names,
    "metrics": metrics,
    "words": words,
    "aliases": aliases,
    "refused": refused,
    "study-tests": study_tests,
    "study-coefficient": study_coefficient,
    "study-estimators": study_estimators,
    "study-lora": study_lora,
    "study-far": study_far,
    "ablate-example": ablate_example,
    "coefficients-short": coefficients_short,
    "coefficients-kl": coefficients_kl,
}


def written(page: str) -> str:
    """Return a page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        make = TABLES.get(found[2])
        return found[0] if make is None else found[1] + make() + found[3]

    return TABLE.sub(made, page)


def pages() -> Iterator[Path]:
    """Yield the pages that have such a table."""
    for path in sorted(DOCS.rglob("*.md")):
        if any(f"<!-- table: {name} -->" in path.read_text() for name in TABLES):
            yield path


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text()))
