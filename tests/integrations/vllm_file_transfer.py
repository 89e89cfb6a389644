"""Sends TRL's weights to a vLLM server through a file: TRL's own way, NCCL, needs a GPU.

`register` runs in the server, by an entry point of vLLM; `replace_transfer` in the trainer.
"""

from pathlib import Path
from typing import Any

BACKEND = "klinic_test_file"
WEIGHTS = "weights.safetensors"
ENTRY_POINT = f"[vllm.general_plugins]\n{BACKEND} = integrations.vllm_file_transfer:register\n"


def write_plugin(folder: Path) -> None:
    """Write a distribution whose entry point vLLM finds once the folder is on its path."""
    package = folder / f"{BACKEND}-0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BACKEND}\nVersion: 0.1\n")
    (package / "entry_points.txt").write_text(ENTRY_POINT)


def register() -> None:
    """Let a server load weights from the file that the trainer names."""
    from dataclasses import dataclass

    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer import base, factory
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader import reload

    @dataclass
    class NoGroup(base.WeightTransferInitInfo):
        pass

    @dataclass
    class File(base.WeightTransferUpdateInfo):
        path: str = ""

    class FileEngine(base.WeightTransferEngine):
        init_info_cls, update_info_cls = NoGroup, File

        def init_transfer_engine(self, init_info: NoGroup) -> None:
            pass

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: File) -> None:
            self.model.load_weights(load_file(update_info.path).items())

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            # the head is tied to the embedding, and its packed copy would keep the old weights
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

        def shutdown(self) -> None:
            pass

    engines = factory.WeightTransferEngineFactory
    if BACKEND not in engines._registry:
        engines.register_engine(BACKEND, FileEngine)


def replace_transfer(folder: Path, *, is_stale: bool) -> None:
    """Send TRL's weights by a file in a folder; with `is_stale` the server keeps those it has."""
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    def init_communicator(self: Any, device: Any = 0) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self: Any, metadata: Any, named_params: Any) -> None:
        path = folder / WEIGHTS
        save_file({name: p.detach().clone().contiguous() for name, p in named_params}, path)
        if is_stale:
            return
        self._start_weight_update()
        update = {"update_info": {"path": str(path)}}
        self._post(f"{self.base_url}/update_weights", json=update)
        self._finish_weight_update()

    VLLMClient.init_communicator = init_communicator
    VLLMClient.update_named_params = update_named_params
    VLLMClient.close_communicator = lambda self: None
