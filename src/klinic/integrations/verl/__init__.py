"""Integration with verl's V1 trainer: step records and live diagnosis by one line of configuration.

callback.py   the class that `trainer.checkpoint_callback_class` names, and the hooks of the trainer
settings.py   verl's configuration as the settings of the run
batch.py      a batch of the TransferQueue as the arguments of `Recorder.record_step`

Nothing here imports verl or torch before a trainer exists, so that the mapping is tested without.
"""

from klinic.integrations.verl.callback import KlinicCallback

__all__ = ["KlinicCallback"]
