"""What vLLM loads of klinic in each of its processes. It must stay cheap to import."""


def register() -> None:
    """Make klinic's way of delivering weights known to vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from klinic.sampler.vllm_transfer import BACKEND

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "klinic.sampler.vllm_worker", "WeightReceiver"
        )
