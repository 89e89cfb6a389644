r"""Reads metrics from the text that a trainer prints: a captured console, `nohup.out`, `train.log`.

    {'loss': 0.01, 'kl': 0.0004, 'epoch': 0.01}          TRL, Unsloth, ms-swift, OpenRLHF
    step 3: {'train/loss': 0.01, 'train/kl_loss': 0.0}   slime, miles
    step:3 - actor/kl_loss:0.001 - actor/grad_norm:0.1   verl
    Step 3 | 10.2s | Loss 0.01 | Mismatch KL 0.0004      prime-rl
    ===== Step 3/100 =====, then lines "Loss: 0.01"      NeMo-RL
    step 3 | loss 0.01 | kl 0.0004                       a loop of your own

A line counts if it has a metric with a known name, and a step or a second known name. A dict
without a step gets that of the progress bar before it, `3/300 [`, if the bar was drawn at every one
of them; otherwise lines are counted. Nothing is evaluated: names and numbers are matched as text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST_ENTRY, numbered_lines, open_file
from klinic.evidence.readers.log import LogBuilder, ScalarLog
from klinic.evidence.readers.names import UNRECOGNISED

NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,4})?|\.\d{1,30}|nan|NaN|inf(?:inity)?)"
TYPED = r"(?:np\.float(?:32|64)\(|np\.int(?:32|64)\(|tensor\()?"
END = r"(?=[\s,;)'\"}\]|%]|$)"
NAME = r"(?<![\w./@])['\"]?([A-Za-z_][\w./@()\-]{0,99})['\"]?"
PAIR = re.compile(NAME + r" {0,3}[:=] {0,3}['\"]?" + TYPED + f"({NUMBER})" + END)
PHRASE = re.compile(rf"^\W*([A-Za-z][\w./ ]{{0,60}}?)[ :=]{{1,4}}({NUMBER})[a-z%/ ]{{0,12}}$")
STEP = re.compile(
    r"(?<![\w/])(?:[Tt]rain |[Tt]raining |[Gg]lobal )?[Ss]tep[ :=#_]{1,3}(\d{1,15})\b"
)
BAR = re.compile(r"\b(\d{1,15})/\d{1,15} \[")
ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
PHRASES = {
    "mismatch kl": "mismatch_kl/all/mean",
    "grad. norm": "optim/grad_norm",
    "generation kl error": "gen_kl_error",
    "avg reward": "reward",
    "grad norm": "grad_norm",
}
"""Names as prime-rl and NeMo-RL print them, by those under which they log them."""
SEPARATOR = re.compile(r" ?\| ?| - ")
MOST_PAIRS = 2_000  # of a line


@dataclass(slots=True)
class _Console:
    """The steps and entries of the lines so far."""

    header_step: int | None = None
    """The step of a header line, for the lines after it."""
    bar: int | None = None
    entries: list[tuple[int | None, int | None, dict[str, float]]] = field(default_factory=list)
    """Step, progress bar and metrics of each entry."""

    def add_line(self, line: str) -> None:
        bars = BAR.findall(line) if " [" in line else ()
        self.bar = int(bars[-1]) if bars else self.bar
        match = STEP.search(line)
        step = None if match is None else int(match[1])
        metrics = _metrics_of(line)
        num_known = len(list(islice(filter(_is_known, metrics), 2)))  # two are an entry
        if step is None and "{" not in line:  # TRL prints a header after its dict
            step = self.header_step
        if num_known and (num_known > 1 or step is not None):
            self.entries.append((step, self.bar, metrics))
        elif match is not None:
            self.header_step = int(match[1])


def has_metrics(path: Path) -> bool:
    """Whether the first lines of a text hold metrics."""
    console = _Console()
    with open_file(path) as file:
        for line in file.read(LONGEST_ENTRY).splitlines():
            console.add_line(_plain_text(line))
            if console.entries:
                return True
    return False


def read_log(path: Path) -> ScalarLog:
    """Return the metrics in a text."""
    console = _Console()
    for number, line in numbered_lines(path, longest=LONGEST_ENTRY):
        if b"\0" in line:
            raise EvidenceError(
                f"{path}, line {number}: holds zero bytes, so the file is not the text of a run. "
                "Check the path."
            )
        console.add_line(_plain_text(line))
    builder = LogBuilder()
    for step, metrics in _numbered_entries(console):
        builder.add(step, metrics)
    return builder.build_log(format="printed text", files=(path,))


def _plain_text(line: bytes) -> str:
    return ESCAPE.sub("", line.decode(errors="replace")).rstrip()


@lru_cache(maxsize=4096)
def _is_known(name: str) -> bool:
    return UNRECOGNISED.klinic_name(name) is not None


def _metrics_of(line: str) -> dict[str, float]:
    """Return the pairs `name: value` of a line, and the phrases between its separators."""
    if "{" in line:
        metrics = _metrics_of_dict(line)
        return _metrics_of_pairs(line) if metrics is None else metrics
    metrics = _metrics_of_pairs(line)
    for segment in SEPARATOR.split(line)[:MOST_PAIRS]:
        if phrase := PHRASE.match(segment):
            name = phrase[1].strip().lower()
            if name != "step":
                metrics[PHRASES.get(name, name)] = float(phrase[2])
    return metrics


def _metrics_of_pairs(line: str) -> dict[str, float]:
    # `NUMBER` matches nothing that float() refuses
    return {name: float(value) for name, value in PAIR.findall(line)[:MOST_PAIRS]}


def _metrics_of_dict(line: str) -> dict[str, float] | None:
    """Return the numbers of a line with one printed dict, ten times as fast as `PAIR`.

    None for a line with anything but numbers in the dict.
    """
    head, _, rest = line.partition("{")
    body, _, tail = rest.rpartition("}")
    if "{" in body or "[" in body:
        return None
    try:
        values: dict[str, float] = json.loads("{" + body.replace("'", '"') + "}")
    except ValueError:  # such as `nan`
        return None
    if not {float, int}.issuperset(map(type, values.values())) or len(values) > MOST_PAIRS:
        return None
    return _metrics_of_pairs(head) | values | _metrics_of_pairs(tail)


def _numbered_entries(console: _Console) -> Iterator[tuple[int | None, dict[str, float]]]:
    """Yield the entries with their steps; those of the progress bar if no line has one."""
    bars = [bar for _, bar, _ in console.entries]
    by_bar = all(step is None for step, _, _ in console.entries) and _are_steps(bars)
    for step, bar, metrics in console.entries:
        yield (bar if by_bar else step), metrics


def _are_steps(bars: list[int | None]) -> bool:
    """Whether a progress bar was drawn at every entry: multiples of the first one, in order."""
    counts = [bar for bar in bars if bar is not None]
    if len(counts) < len(bars) or not counts or counts[0] < 1:
        return False
    return counts == [counts[0] * n for n in range(1, len(counts) + 1)]
