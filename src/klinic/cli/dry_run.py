"""`klinic train --dry-run`: sizes, memory and cost of a recipe before training."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.capacity.memory import KINDS, DeviceMemory, largest_phase, memory_per_device
from klinic.capacity.throughput import Accelerator
from klinic.cli.printing import GB, format_bytes, print_json
from klinic.cli.step_cost import cost_fields, cost_rows, split_fields, split_lines
from klinic.cluster.placement import WorkerPlacement, describe_placements, worker_placements
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from klinic.capacity.fitting import Fitting
    from klinic.capacity.forecast import Forecast, StepCost
    from klinic.capacity.throughput import DeviceSplit
    from klinic.recipe.loading import LoadedRecipe
    from klinic.recipe.recipe import Recipe

STATUS = Path("/proc/self/status")
OVERHEAD = "libraries"
ORDER = (*KINDS, OVERHEAD)
PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs to shard the learner over."""

    num: int
    memory: int
    """Bytes per GPU."""

    @property
    def accelerator(self) -> Accelerator:
        """One of the GPUs, with assumed values for everything but its memory."""
        return Accelerator(memory=self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """Results of a dry run."""

    loaded: "LoadedRecipe"
    forecast: "Forecast | None"
    """None if the model's config is unavailable."""
    overhead: int
    machine: Machine | None
    cost: "StepCost | None" = None
    device: DeviceMemory | None = None
    split: "DeviceSplit | None" = None
    fitting: "Fitting | None" = None
    """Changes with which it fits; None where it fits as it is."""

    @property
    def unknown_reason(self) -> str:
        """Why there is no forecast, and how to get one."""
        return (
            f"the config of {self.loaded.recipe.model.name} (or of reference.path) cannot be read "
            "here. A folder with the model's config.json is enough: model.name=FOLDER"
        )


def machine_of(gpus: int | None, gpu_memory: float | None) -> Machine | None:
    """Return the GPUs that the options describe."""
    if gpu_memory is None:
        if gpus is not None:
            raise ConfigError(
                f"--gpus {gpus} without --gpu-memory: the free memory cannot be computed. Give the "
                "GB of each GPU, such as --gpu-memory 80."
            )
        return None
    return Machine(num=gpus or 1, memory=round(gpu_memory * GB))


def dry_run(loaded: "LoadedRecipe", machine: Machine | None, *, as_json: bool) -> None:
    """Print the forecast of a run; nothing is trained and no weights are loaded."""
    from rich.console import Console

    with Console(stderr=True).status("Tracing a step without weights ..."):
        result = _estimate(loaded, machine)
    if as_json:
        print_json("train --dry-run", ok=True, **_json_fields(result))
    else:
        _print_result(result, Console(highlight=False))


def _estimate(loaded: "LoadedRecipe", machine: Machine | None) -> DryRunResult:
    from klinic.capacity.forecast import forecast_memory, split_accelerators, step_cost

    recipe, began = loaded.recipe, time.monotonic()
    if not _is_known(recipe):
        return DryRunResult(loaded=loaded, forecast=None, overhead=0, machine=machine)
    if machine is None:
        estimate = forecast_memory(recipe)
        # this process has imported everything a run imports, and holds no weights
        return DryRunResult(
            loaded=loaded,
            forecast=estimate,
            overhead=resident_bytes(),
            machine=None,
            cost=step_cost(recipe, estimate),
        )
    estimate = forecast_memory(recipe, num_gpus=machine.num)
    device = _device_memory(recipe, estimate, machine)
    return DryRunResult(
        loaded=loaded,
        forecast=estimate,
        overhead=0,
        machine=machine,
        cost=step_cost(recipe, estimate),
        device=device,
        split=split_accelerators(estimate, machine.accelerator, num=machine.num),
        fitting=_find_fitting(recipe, machine, began) if device.free_bytes < 0 else None,
    )


def _device_memory(recipe: "Recipe", forecast: "Forecast", machine: Machine) -> DeviceMemory:
    return memory_per_device(
        forecast.phases,
        num=machine.num,
        memory=machine.memory,
        num_parameters=forecast.num_parameters,
        engine_sleeps=recipe.cluster is None and recipe.sampler.sleep_level != 0,
    )


def _find_fitting(recipe: "Recipe", machine: Machine, began: float) -> "Fitting":
    from klinic.capacity.fitting import find_fitting

    return find_fitting(
        recipe,
        lambda forecast: _device_memory(recipe, forecast, machine).free_bytes >= 0,
        num_gpus=machine.num,
        began=began,
    )


def _is_known(recipe: "Recipe") -> bool:
    from klinic.capacity.meta_policy import is_config_reachable

    reference = None if recipe.kl is None else recipe.reference.path
    return all(
        is_config_reachable(name) for name in (recipe.model.name, reference) if name is not None
    )


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if unavailable (not Linux)."""
    if not STATUS.exists():
        return 0
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def _json_fields(result: DryRunResult) -> dict[str, Any]:
    forecast, device = result.forecast, result.device
    recipe = result.loaded.recipe
    fields = {
        "recipe": recipe.model_dump(mode="json"),
        "sizes": recipe.sizes(),
        "processes": _process_placement(recipe),
    }
    if forecast is None or result.cost is None:
        return {**fields, "memory": None, "unknown": result.unknown_reason}
    highest = largest_phase(forecast.phases)
    return {
        **fields,
        "num_parameters": forecast.num_parameters,
        "num_trainable": forecast.num_trainable,
        "prompts": forecast.lengths,
        "memory": {
            "phases": {phase.name: dict(phase.num_bytes) for phase in forecast.phases},
            "overhead": result.overhead,
            "peak": {"phase": highest.name, "bytes": highest.total_bytes + result.overhead},
            "not_counted": _not_counted(recipe, forecast),
        },
        "step": cost_fields(result.cost),
        "device": None
        if device is None
        else {
            **_device_fields(device),
            "fit": None if result.fitting is None else _fitting_fields(result.fitting),
            "split": split_fields(result.split),
        },
    }


def _process_placement(recipe: "Recipe") -> list[WorkerPlacement]:
    import torch

    return worker_placements(recipe, gpus=torch.cuda.is_available())


def _device_fields(device: DeviceMemory) -> dict[str, Any]:
    return {
        "phase": device.phase.name,
        "bytes": dict(device.phase.num_bytes),
        "allowance": dict(device.allowance),
        "left": device.free_bytes,
        "gpu_memory_utilization": device.sampler_fraction,
        "vllm_weights": device.sampler_weight_bytes,
    }


def _fitting_fields(fitting: "Fitting") -> dict[str, Any]:
    return {
        "fits": fitting.fits,
        "changes": {change.key: change.after for change in fitting.changes},
    }


def _print_result(result: DryRunResult, console: "Console") -> None:
    print_wrapped = partial(_print_wrapped, console)
    forecast, recipe = result.forecast, result.loaded.recipe
    print_wrapped(f"Sizes: {recipe.sizes()}")
    for line in describe_placements(recipe, _process_placement(recipe)):
        print_wrapped(line)
    if forecast is None or result.cost is None:
        print_wrapped(f"Memory: not known, since {result.unknown_reason}")
        return
    print_wrapped(
        f"Parameters: {forecast.num_parameters:,}, of which {forecast.num_trainable:,} are trained"
    )
    counted = (
        "counted" if forecast.lengths.assumed is None else f"assumed: {forecast.lengths.assumed}"
    )
    print_wrapped(f"Longest prompt: {forecast.lengths.longest} tokens ({counted})")
    if result.machine is not None:
        _print_ranks(result.machine, print_wrapped)
    _print_phases(forecast, result.overhead, console)
    highest = largest_phase(forecast.phases)
    print_wrapped(
        f"Peak: {format_bytes(highest.total_bytes + result.overhead)}, while {highest.name}."
    )
    print_wrapped(f"Not counted: {', '.join(_not_counted(recipe, forecast))}.")
    _print_cost(cost_rows(result.cost, recipe), console)
    if result.device is not None and result.machine is not None:
        _print_device(result.device, result.machine, print_wrapped)
        if result.fitting is not None:
            _print_fitting(result.fitting, print_wrapped)
        if result.machine.num > 1 and result.cost.work is not None:
            for line in split_lines(result.split, result.machine.accelerator):
                print_wrapped(line)


def _print_wrapped(console: "Console", text: str) -> None:
    """Print a line verbatim; on a terminal, wrap it between words."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _print_cost(rows: Mapping[str, str], console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("a step, all completions at full length")
    for name, figure in rows.items():
        table.add_row(name, figure)
    console.print(table)


def _print_phases(forecast: "Forecast", overhead: int, console: "Console") -> None:
    columns = {phase.name: {**phase.num_bytes, OVERHEAD: overhead} for phase in forecast.phases}
    console.print(_bytes_table(columns))


def _print_ranks(machine: Machine, print_line: PrintLine) -> None:
    if machine.num == 1:
        print_line("On one GPU, traced with tensors without data:")
        return
    print_line(
        f"On each of {machine.num} GPUs, traced with tensors without data on a process group that "
        "sends nothing. The learner is sharded by FSDP2:"
    )


def _print_device(device: DeviceMemory, machine: Machine, print_line: PrintLine) -> None:
    reserved = ", ".join(f"{name} {format_bytes(size)}" for name, size in device.allowance.items())
    print_line(
        f"Reserved beside the tensors of each GPU, assumed and not measured: {reserved}. "
        f"See `docs/explanation/memory.md`."
    )
    if device.free_bytes < 0:
        print_line(
            f"It does not fit {format_bytes(machine.memory)}: "
            f"{format_bytes(-device.free_bytes)} more are needed on each GPU."
        )
        return
    print_line(f"It fits: {format_bytes(device.free_bytes)} are left on each GPU.")
    own = f"its own copy of the model in bf16 takes {format_bytes(device.sampler_weight_bytes)}"
    if device.engine_bytes < device.sampler_weight_bytes:
        print_line(f"No room for vLLM on the same GPUs: {own}. Use separate GPUs for it.")
        return
    share = f"gpu_memory_utilization={device.sampler_fraction:.2f}"
    asleep = device.engine_bytes > device.free_bytes
    sleeps = " if it sleeps while the learner trains" if asleep else ""
    print_line(f"vLLM on the same GPUs can use {share} at most{sleeps}, and {own} of it.")


def _print_fitting(fitting: "Fitting", print_line: PrintLine) -> None:
    if fitting.forecast is None:
        print_line(
            "No change of memory settings is left: use more or larger GPUs, or a smaller model."
        )
        return
    peak = format_bytes(largest_phase(fitting.forecast.phases).total_bytes)
    if fitting.fits:
        print_line(f"It fits with these changes (peak {peak}):")
    elif fitting.has_more:
        print_line(f"It does not fit with these changes (peak {peak}); there was no time for more:")
    else:
        print_line(
            f"It does not fit even with these changes (peak {peak}): use more or larger GPUs, or a "
            "smaller model:"
        )
    for change in fitting.changes:
        print_line(f"  {change.key}: {_yaml(change.before)} -> {_yaml(change.after)}")


def _yaml(value: object) -> str:
    """Return a value as YAML writes it.

    >>> _yaml(None), _yaml(True), _yaml(4)
    ('null', 'true', '4')
    """
    return "null" if value is None else str(value).lower()


def _not_counted(recipe: "Recipe", forecast: "Forecast") -> list[str]:
    left_out = {
        f"activations, logits and cache, since {forecast.left_out}": forecast.left_out is not None,
        "memory cached by the allocator": True,
        "reward functions": True,
        "the warm start": recipe.warm_start is not None,
        "replies of sampling.reply": recipe.sampling.reply is not None,
        "savings of model.compile": recipe.model.compile,
    }
    return [name for name, is_so in left_out.items() if is_so]


def _bytes_table(columns: Mapping[str, Mapping[str, int]]) -> "Table":
    """Return a table of bytes with one row per kind present, and totals."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
    for kind in sorted(kinds, key=ORDER.index):
        sizes = [column.get(kind, 0) for column in columns.values()]
        if any(sizes):
            table.add_row(kind, *map(format_bytes, sizes))
    table.add_section()
    table.add_row("total", *(format_bytes(sum(column.values())) for column in columns.values()))
    return table
