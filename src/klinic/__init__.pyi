from klinic.integrations.trl.attach import attach as attach
from klinic.recipe.python_sections import KL as KL
from klinic.recipe.python_sections import Recovery as Recovery
from klinic.training.api import train as train

__version__: str
__all__ = ["KL", "Recovery", "__version__", "attach", "train"]
