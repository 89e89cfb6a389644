"""The text file of `klinic check --device`, made to be pasted into a bug report.

It has versions, the device and one line for each result. It has no paths, no user names, and
nothing of prompts, completions or data.
"""

import platform
import re
import traceback
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import klinic
from klinic.errors import ConfigError
from klinic.evidence.writing import write_atomically
from klinic.replay.check_report import CheckReport, ComponentResult

PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
OWN_FILES = f"{Path(klinic.__file__).parent}/"
TRUSTED_FILES = (OWN_FILES, f"{Path(torch.__file__).parent}/")
"""Files whose errors hold no text of prompts or data."""


MODEL_LINE = "model and device"  # it names the model, which may be a path


class SelfTestFile:
    """Writes the results of a check to a file at the end, with the error if there was one."""

    def __init__(self, path: Path, device: torch.device, report: CheckReport) -> None:
        self._path, self._device, self._report = path, device, report

    def __enter__(self) -> "SelfTestFile":
        self._write(["not finished"])  # fails here where it cannot be written
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        lines = _result_lines(self._report.components)
        diagnosis = self._report.diagnosis
        if diagnosis is not None:
            lines.append(f"cause: {diagnosis.cause or 'none found'}")
        lines.append(f"passed: {self._report.ok}" if error is None else _error_line(error))
        self._write(lines)

    def _write(self, lines: list[str]) -> None:
        heading = ["klinic check --device", *_environment_lines(self._device), ""]
        try:
            write_atomically(self._path, "\n".join([*heading, *lines, ""]).encode())
        except OSError as error:
            raise ConfigError(
                f"--output is {self._path}: it cannot be written ({error.strerror}). Give a file "
                "in a folder that exists."
            ) from error


def _environment_lines(device: torch.device) -> list[str]:
    """Return the versions of packages and driver, and the hardware."""
    versions = ", ".join(f"{name} {_version_of(name)}" for name in PACKAGES)
    return [
        f"klinic {klinic.__version__}, Python {platform.python_version()}, {versions}",
        f"system: {platform.system()} {platform.machine()}",
        f"device: {_describe_device(device)}",
        f"driver: {_driver_version(device)}",
    ]


def _result_lines(results: Iterable[ComponentResult]) -> list[str]:
    """Return one line for each result but that of the model."""
    return [
        f"{'ok  ' if result.ok else 'FAIL'} {result.name}: {result.detail}"
        for result in results
        if result.name != MODEL_LINE
    ]


def _error_line(error: BaseException) -> str:
    """Return kind and place of an error, and its message if that can hold no private text."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(OWN_FILES)]
    place = f" at {own[-1].filename.removeprefix(OWN_FILES)}:{own[-1].lineno}" if own else ""
    raised_in = frames[-1].filename if frames else ""
    is_trusted = isinstance(error, RuntimeError) and raised_in.startswith(TRUSTED_FILES)
    message = f": {_without_paths(str(error).partition(chr(10))[0])}" if is_trusted else ""
    return f"FAIL stopped by {type(error).__name__}{place}{message}"


def _without_paths(text: str) -> str:
    """Replace every word that contains a slash or a backslash.

    >>> _without_paths("no kernel for /home/ann/x.py here")
    'no kernel for (path) here'
    """
    return re.sub(r"\S*[/\\]\S*", "(path)", text)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _describe_device(device: torch.device) -> str:
    if device.type not in ("cuda", "xpu"):
        return str(device)
    module = torch.get_device_module(device.type)
    properties = module.get_device_properties(device)
    built_for = torch.version.hip or torch.version.cuda or torch.version.xpu
    return (
        f"{device}, {properties.name}, {properties.total_memory / 2**30:.1f} GB, "
        f"{module.device_count()} present, torch built for {built_for}"
    )


def _driver_version(device: torch.device) -> str:
    if device.type == "xpu":
        return str(torch.xpu.get_device_properties(device).driver_version)
    if device.type == "cuda" and NVIDIA_DRIVER.is_file():
        found = re.search(r"\d+\.\d+(\.\d+)?", NVIDIA_DRIVER.read_text())
        return "not known" if found is None else found[0]
    return "not known"
