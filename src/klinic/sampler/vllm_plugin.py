"""vLLM plugin, loaded in each vLLM process; it must stay cheap to import."""

import multiprocessing
import os

from klinic.orphans import PARENT, die_with


def register() -> None:
    """Register klinic's weight-transfer engine with vLLM."""
    _go_with_the_run()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from klinic.sampler.vllm_transfer import BACKEND

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "klinic.sampler.vllm_worker", "WeightReceiver"
        )


def _go_with_the_run() -> None:
    """Terminate an engine that klinic started when the run dies; a server keeps running."""
    parent = multiprocessing.parent_process()
    owner = os.environ.get(PARENT)
    if owner is not None and parent is not None and parent.pid == int(owner):
        die_with(int(owner))
