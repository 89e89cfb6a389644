"""vLLM plugin, loaded in each vLLM process; it must stay cheap to import."""

import multiprocessing
import os

from klinic.runtime.process_tree import PARENT_PID_VARIABLE, die_with_parent

BACKEND = "klinic"
"""Name of klinic's weight-transfer engine."""
RECEIVER_MODULE = "klinic.sampler.vllm.weight_receiver"
WORKER_EXTENSION = f"{RECEIVER_MODULE}.WorkerExtension"


def register() -> None:
    """Register klinic's weight-transfer engine with vLLM."""
    _die_with_run()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice
        WeightTransferEngineFactory.register_engine(BACKEND, RECEIVER_MODULE, "WeightReceiver")


def _die_with_run() -> None:
    """Terminate an engine that klinic started when the run dies; a server keeps running."""
    parent = multiprocessing.parent_process()
    owner = os.environ.get(PARENT_PID_VARIABLE)
    if owner is not None and parent is not None and parent.pid == int(owner):
        die_with_parent(int(owner))
