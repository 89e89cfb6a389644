"""Loads the stand-in device into torch; torch does so itself where this folder is on the path.

The folder `standin_backend.dist-info` names `load` as an entry point of the group `torch.backends`,
so every process, a command of klinic included, has the device with PYTHONPATH alone.
`torch.accelerator` then returns it, as it returns CUDA elsewhere.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "standin"
SOURCE = Path(__file__).with_name("standin.cpp")


def load() -> None:
    """Build the device, register it, and give it attention with the CPU's kernels."""
    import torch

    file = build()
    torch.ops.load_library(file)
    library = ctypes.CDLL(str(file))
    library.standin_register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_attention()


def build() -> Path:
    """Compile the device once per torch version and source."""
    import torch

    root = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("KLINIC_STANDIN_CACHE", tempfile.gettempdir()))
    library = folder / f"klinic-standin-{os.getuid()}-{digest}.so"
    if library.is_file():
        return library
    partial = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(partial)]
    links = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    built = subprocess.run(
        [*command, *includes, *links], check=False, capture_output=True, text=True
    )
    if built.returncode:
        sys.exit(f"the stand-in device was not built:\n{built.stderr[:4000]}")
    partial.replace(library)
    return library


def num_host_reads() -> int:
    """Return how often the host read numbers of the device in this process."""
    function = ctypes.CDLL(str(build())).standin_num_host_reads
    function.restype = ctypes.c_int64
    return int(function())


def _device_module(library: ctypes.CDLL) -> ModuleType:
    import torch

    library.standin_peak_bytes.restype = ctypes.c_int64
    module: Any = ModuleType(f"torch.{NAME}")
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.current_device = lambda: 0
    module.set_device = lambda _: None
    module.synchronize = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda _: None
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda *_: None
    module.max_memory_allocated = lambda *_: library.standin_peak_bytes()
    module.reset_peak_memory_stats = lambda *_: library.standin_reset_peak()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float32]
    return module  # type: ignore[no-any-return]


def _register_attention() -> None:
    """Register the fused attention of the CPU, so that numbers equal those of a CPU bit by bit."""
    import torch

    aten = torch.ops.aten
    kernels = torch.library.Library("aten", "IMPL")
    _KEPT.append(kernels)

    def forward(  # noqa: PLR0913 - the signature of the operator
        query, key, value, attn_bias=None, dropout_p=0.0, is_causal=False, *_, scale=None
    ):
        mask = None if attn_bias is None else attn_bias.cpu()
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.cpu() for x in (query, key, value)),
            dropout_p,
            is_causal,
            attn_mask=mask,
            scale=scale,
        )
        none = torch.empty(0, device=query.device)
        lengths = query.shape[2], key.shape[2]
        return (
            *(out.to(query.device), logsumexp.to(query.device), none, none, *lengths),
            *(none, none, none),
        )

    def backward(*given, scale=None):
        grad_out, query, key, value, attn_bias, _, out, logsumexp = given[:8]
        dropout_p, is_causal = given[12:14]
        mask = attn_bias.cpu() if attn_bias is not None and attn_bias.numel() else None
        given = [x.cpu() for x in (grad_out, query, key, value, out, logsumexp)]
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
        none = torch.empty(0, device=query.device)
        return (*(x.to(query.device) for x in gradients), none)

    fused = "_scaled_dot_product_fused_attention_overrideable"
    kernels.impl(fused, forward, "PrivateUse1")
    kernels.impl(f"{fused}_backward", backward, "PrivateUse1")


_KEPT: list[Any] = []  # a library unregisters its kernels when it is collected
