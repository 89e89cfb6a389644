"""Write the software bill of materials (CycloneDX) of a base install: klinic and what it needs.

    python .ci/sbom.py PYTHON OUT

PYTHON is the interpreter of an environment that holds the packages of `.ci/lock/base.txt`. The same
packages give the same bytes: no time, no serial number, no addresses.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]
GENERATE = (
    *(sys.executable, "-m", "cyclonedx_py", "environment"),
    *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"),
    *("--output-reproducible", "--spec-version", "1.6"),
)


def main(python: str, out: str) -> None:
    """Generate, reduce, validate, write."""
    bom = json.loads(subprocess.check_output([*GENERATE, python]))
    root = bom["metadata"]["component"]
    root["version"] = ProjectMetadata(str(ROOT), PluginManager()).version
    del bom["metadata"]["tools"], bom["$schema"]  # the format and its version are named anyway
    keep_needed(bom, root["bom-ref"])
    for component in bom["components"]:
        component.pop("externalReferences", None)

    text = json.dumps(bom, indent=1, sort_keys=True) + "\n"
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert fault is None, f"{out} would be no CycloneDX 1.6: {fault}"
    assert "://" not in text, f"{out} would name an address"
    Path(out).write_text(text)
    print(f"{out}: {len(bom['components'])} packages")


def keep_needed(bom: dict[str, Any], root: str) -> None:
    """Drop the packages that klinic does not need, such as the installer itself."""
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in bom["dependencies"]}
    needed, waiting = set[str](), [root]
    while waiting:
        ref = waiting.pop()
        if ref not in needed:
            needed.add(ref)
            waiting += needs[ref]
    bom["components"] = [found for found in bom["components"] if found["bom-ref"] in needed]
    bom["dependencies"] = [entry for entry in bom["dependencies"] if entry["ref"] in needed]


main(*sys.argv[1:])
