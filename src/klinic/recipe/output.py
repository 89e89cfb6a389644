"""The `output` section: what a run leaves behind, and where."""

from klinic.recipe.section import CountOrZero, Section, Text


class OutputSection(Section):
    """The folder of the run."""

    dir: Text | None = None
    """Folder of the run; null is `runs/` and the name of the recipe file or of the model."""
    tensorboard: bool = True
    """Whether to write TensorBoard curves."""
    records_every: CountOrZero = 1
    """Steps between recorded steps, token by token; 0 is none."""
