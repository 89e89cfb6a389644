"""Draw the badges of README from the facts of the project: `python docs/draw_badges.py`."""

import tomllib
from pathlib import Path

from klinic.checks import CHECKS

DOCS = Path(__file__).parent
LETTER, PADDING = 6.6, 12  # pixels
BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{label}: {value}">
<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)">
<rect width="{left}" height="20" fill="#444c56"/>
<rect x="{left}" width="{right}" height="20" fill="#1f6feb"/>
</g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{label_x}" y="14">{label}</text>
<text x="{value_x}" y="14">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """Return the SVG of each badge by its file name."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    facts = {
        "python": ("python", project["requires-python"].removeprefix(">=") + "+"),
        "licence": ("license", project["license"]),
        "causes": ("causes with a check", str(len(CHECKS))),
        "dependencies": ("diagnosis without torch", f"{len(project['dependencies'])} dependencies"),
    }
    return {f"badge-{name}.svg": draw(*fact) for name, fact in facts.items()}


def draw(label: str, value: str) -> str:
    """Return the SVG of a badge."""
    left, right = (round(PADDING + LETTER * len(text)) for text in (label, value))
    return BADGE.format(
        label=label,
        value=value,
        left=left,
        right=right,
        width=left + right,
        label_x=left / 2,
        value_x=left + right / 2,
    )


if __name__ == "__main__":
    for name, svg in badges().items():
        (DOCS / "assets" / name).write_text(svg)
