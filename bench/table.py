"""`python -m bench.table`: write the table of docs/performance.md from the raw files beside it.

What `python -m bench` prints has the same columns.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.arithmetic_runs import markdown

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TABLE = re.compile(r"(?<=<!-- table: performance -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADS = ("ratio", "median", "95% interval", "must be", "A/A control", "rounds", "shown")


def table(ratios: Mapping[str, Mapping[str, Any]]) -> str:
    """Return measured ratios as they came out."""
    return markdown(HEADS, [_row(name, found) for name, found in ratios.items()])


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    def span(low: str, high: str) -> str:
        return f"{found[low]:.3f} to {found[high]:.3f}" if low in found else ""

    bound = "" if found["must"] is None else f"{found['side']} {found['must']:.3g}"
    return (
        *(name, f"{found['median']:.3f}", span("low", "high"), bound, span("aa_low", "aa_high")),
        *(str(found.get("rounds", "")), "yes" if found["ok"] else "no"),
    )


def kept() -> dict[str, Any]:
    """Return the ratios of the raw files, in the order in which `all` measures them."""
    from bench.catalogue import BENCHES  # needs torch, which the table does not

    files = [PAGE.with_suffix("") / f"{name}.json" for name in BENCHES]
    raw = [json.loads(path.read_text())["ratios"] for path in files if path.is_file()]
    return {name: found for ratios in raw for name, found in ratios.items()}


def written(page: str) -> str:
    """Return the page with its table made anew."""
    return TABLE.sub(lambda _: table(kept()) + "\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
