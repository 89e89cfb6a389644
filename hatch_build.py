"""Puts the bill of materials into a wheel, where CI has written one (PEP 770)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SBOM = "klinic.cdx.json"


class BillOfMaterials(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel that is built without one, say from a clone, is as good and has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the file to what goes into `.dist-info/sboms`."""
        if Path(self.root, SBOM).is_file():
            build_data["sbom_files"].append(SBOM)
