"""The run log of a TRL run: its recipe.yaml holds TRL's config."""

from collections.abc import Mapping
from typing import Any

from klinic.doctor.foreign_run_log import DOCTOR_MODES, ForeignRunLog
from klinic.recipe import yaml_text

__all__ = ["DOCTOR_MODES", "TRLRunLog"]

RECIPE_HEADER = "# TRL's config, as far as recipe keys exist for it.\n"


class TRLRunLog(ForeignRunLog):
    """Writes the run folder step by step and feeds the live doctor."""

    def begin_trl_run(
        self, facts: Mapping[str, Any], recipe: Mapping[str, Any], texts: Mapping[int, str]
    ) -> None:
        """Write the files of the whole run, with TRL's config as its recipe."""
        self.begin_run(facts, texts, RECIPE_HEADER + yaml_text.dump_yaml(dict(recipe)))
