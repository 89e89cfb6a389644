from klinic.doctor.recorder import Recorder as Recorder
from klinic.integrations.torch_processes import TorchProcesses as TorchProcesses
from klinic.integrations.trl.attach import attach as attach
from klinic.recipe.python_sections import KL as KL
from klinic.recipe.python_sections import Recovery as Recovery
from klinic.training.api import train as train
from klinic.training.result import Result as Result

__version__: str
__all__ = [
    "KL",
    "Recorder",
    "Recovery",
    "Result",
    "TorchProcesses",
    "__version__",
    "attach",
    "train",
]
