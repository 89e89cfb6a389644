"""Builds and loads the CUDA guard (cuda_guard.cpp), which must be in the process before torch.

A process with it believes that its accelerator is CUDA, so only scripts load it, never a test.
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def load() -> None:
    """Load the guard into this process."""
    assert "torch" not in sys.modules, "load the guard before torch is imported"
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


def build() -> Path:
    """Compile the guard once per torch installation, whose path it links to, and source."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    version = (root / "version.py").read_bytes()
    digest = hashlib.sha256(SOURCE.read_bytes() + version + bytes(root)).hexdigest()[:16]
    folder = Path(os.environ.get("KLINIC_STANDIN_CACHE", tempfile.gettempdir()))
    library = folder / f"klinic-cuda-guard-{os.getuid()}-{digest}.so"
    if library.is_file():
        return library
    partial = library.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(partial)]
    links = [f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, *links, f"-Wl,-rpath,{root}/lib"], check=True)
    partial.replace(library)
    return library
