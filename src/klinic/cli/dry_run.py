"""`klinic train --dry-run`: sizes, memory and cost of a recipe before training."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.cli.printing import GB, print_json, size
from klinic.cli.step_cost import cost_fields, cost_rows, split_fields, split_lines
from klinic.cluster.placement import Place, placement, sentences
from klinic.errors import ConfigError
from klinic.model.memory import GATHERED, KINDS, Device, largest, per_device
from klinic.model.scale import Accelerator

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from klinic.loop.cost import Cost
    from klinic.loop.forecast import Forecast
    from klinic.model.scale import Split
    from klinic.recipe.loading import Loaded
    from klinic.recipe.recipe import Recipe

STATUS = Path("/proc/self/status")
OVERHEAD = "libraries"
ORDER = (*KINDS, GATHERED, OVERHEAD)


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
class Answer:
    """Results of a dry run."""

    loaded: "Loaded"
    found: "Forecast | None"
    """None if the model's config is unavailable."""
    overhead: int
    machine: Machine | None
    cost: "Cost | None" = None
    device: Device | None = None
    split: "Split | None" = None

    @property
    def unknown(self) -> str:
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


def dry_run(loaded: "Loaded", machine: Machine | None, *, as_json: bool) -> None:
    """Print the forecast of a run; nothing is trained and no weights are loaded."""
    from rich.console import Console

    with Console(stderr=True).status("Tracing a step without weights ..."):
        answer = _answer(loaded, machine)
    if as_json:
        print_json("train --dry-run", ok=True, **_fields(answer))
    else:
        _print(answer, Console(highlight=False))


def _answer(loaded: "Loaded", machine: Machine | None) -> Answer:
    from klinic.loop.cost import cost_of, division
    from klinic.loop.forecast import forecast

    if not _is_known(loaded.recipe):
        return Answer(loaded=loaded, found=None, overhead=0, machine=machine)
    found = forecast(loaded.recipe)
    device = split = None
    if machine is not None:
        split = division(found, machine.accelerator, num=machine.num)
        device = per_device(
            found.phases,
            num=machine.num,
            memory=machine.memory,
            largest_layer=found.largest_layer,
            num_parameters=found.num_parameters,
        )
    # this process has imported everything a run imports, and holds no weights
    return Answer(
        loaded=loaded,
        found=found,
        overhead=resident(),
        machine=machine,
        cost=cost_of(loaded.recipe, found),
        device=device,
        split=split,
    )


def _is_known(recipe: "Recipe") -> bool:
    from klinic.model.bare import is_reachable

    reference = None if recipe.kl is None else recipe.reference.path
    return all(is_reachable(name) for name in (recipe.model.name, reference) if name is not None)


def resident() -> int:
    """Return the resident memory of this process in bytes; 0 if unavailable (not Linux)."""
    if not STATUS.exists():
        return 0
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def _fields(answer: Answer) -> dict[str, Any]:
    found, device = answer.found, answer.device
    recipe = answer.loaded.recipe
    fields = {
        "recipe": recipe.model_dump(mode="json"),
        "sizes": recipe.sizes(),
        "processes": _places(recipe),
    }
    if found is None or answer.cost is None:
        return {**fields, "memory": None, "unknown": answer.unknown}
    highest = largest(found.phases)
    return {
        **fields,
        "num_parameters": found.num_parameters,
        "num_trainable": found.num_trainable,
        "prompts": found.lengths,
        "memory": {
            "phases": {phase.name: dict(phase.num_bytes) for phase in found.phases},
            "overhead": answer.overhead,
            "peak": {"phase": highest.name, "bytes": highest.total + answer.overhead},
            "not_counted": _not_counted(recipe, found),
        },
        "step": cost_fields(answer.cost),
        "device": None
        if device is None
        else {"arithmetic": True, **_device_fields(device), "split": split_fields(answer.split)},
    }


def _places(recipe: "Recipe") -> list[Place]:
    import torch

    return placement(recipe, gpus=torch.cuda.is_available())


def _device_fields(device: Device) -> dict[str, Any]:
    return {
        "phase": device.phase.name,
        "bytes": dict(device.phase.num_bytes),
        "left": device.left,
        "gpu_memory_utilization": device.sampler_share,
        "vllm_weights": device.sampler_weights,
    }


def _print(answer: Answer, console: "Console") -> None:
    say = partial(_say, console)
    found, recipe = answer.found, answer.loaded.recipe
    say(f"Sizes: {recipe.sizes()}")
    for line in sentences(recipe, _places(recipe)):
        say(line)
    if found is None or answer.cost is None:
        say(f"Memory: not known, since {answer.unknown}")
        return
    say(f"Parameters: {found.num_parameters:,}, of which {found.num_trainable:,} are trained")
    counted = "counted" if found.lengths.assumed is None else f"assumed: {found.lengths.assumed}"
    say(f"Longest prompt: {found.lengths.longest} tokens ({counted})")
    _print_phases(found, answer.overhead, console)
    highest = largest(found.phases)
    say(f"Peak: {size(highest.total + answer.overhead)}, while {highest.name}.")
    say(f"Not counted: {', '.join(_not_counted(recipe, found))}.")
    _print_cost(cost_rows(answer.cost, recipe), console)
    if answer.device is not None and answer.machine is not None:
        _print_device(answer.device, answer.machine, console)
        if answer.machine.num > 1 and answer.cost.work is not None:
            for line in split_lines(answer.split, answer.machine.accelerator):
                say(line)


def _say(console: "Console", text: str) -> None:
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


def _print_phases(found: "Forecast", overhead: int, console: "Console") -> None:
    columns = {phase.name: {**phase.num_bytes, OVERHEAD: overhead} for phase in found.phases}
    console.print(_table(columns))


def _print_device(device: Device, machine: Machine, console: "Console") -> None:
    say = partial(_say, console)
    say(f"By arithmetic, not measured: {machine.num} x {size(machine.memory)} of GPU memory.")
    if machine.num > 1:
        say("Weights, reference, gradients and optimiser are sharded, as by FSDP's full shard.")
    name = f"{device.phase.name}, on each GPU"
    console.print(_table({name: device.phase.num_bytes}))
    if device.left < 0:
        say(f"It does not fit: {size(-device.left)} more are needed on each GPU.")
        return
    say(f"Left on each GPU: {size(device.left)}, minus the CUDA context.")
    own = f"its own copy of the model in bf16 takes {size(device.sampler_weights)}"
    if device.left < device.sampler_weights:
        say(f"No room for vLLM on the same GPUs: {own}. Use separate GPUs for it.")
        return
    share = f"gpu_memory_utilization={device.sampler_share:.2f}"
    say(f"vLLM on the same GPUs can use {share} at most, and {own} of it.")


def _not_counted(recipe: "Recipe", found: "Forecast") -> list[str]:
    left_out = {
        f"activations, logits and cache, since {found.left_out}": found.left_out is not None,
        "memory cached by the allocator": True,
        "reward functions": True,
        "the warm start": recipe.warm_start is not None,
        "replies of sampling.reply": recipe.sampling.reply is not None,
        "savings of model.compile": recipe.model.compile,
    }
    return [name for name, is_so in left_out.items() if is_so]


def _table(columns: Mapping[str, Mapping[str, int]]) -> "Table":
    """Return a table of bytes with one row per kind present, and totals."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
    for kind in sorted(kinds, key=ORDER.index):
        held = [column.get(kind, 0) for column in columns.values()]
        if any(held):
            table.add_row(kind, *map(size, held))
    table.add_section()
    table.add_row("total", *(size(sum(column.values())) for column in columns.values()))
    return table
