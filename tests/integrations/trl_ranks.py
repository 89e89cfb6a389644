"""One rank of a TRL run of several processes; `test_trl_processes.py` starts it with torchrun.

Trains the cases of a plan one after another, plain and attached, and writes the results of rank 0.
"""

import faulthandler
import hashlib
import io
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

HANG_SECONDS = (
    240  # of a training; then the stacks of all threads are printed and the process exits
)


def let_accelerate_shard_on_cpus() -> None:
    """Let accelerate use FSDP2 on CPUs, which it does on accelerators only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    real = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **how: Any) -> None:
        real(self, *args, fsdp_plugin=fsdp_plugin, **how)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init


def digest_of(trainer: Any) -> str:
    from klinic.model.weights import full_tensor

    total = hashlib.sha256()
    for _, p in trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters():
        total.update(full_tensor(p.detach()).contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def change_batches(trainer: Any, change: Any) -> None:
    """Change every scored batch of a trainer."""
    real = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: change(real(inputs))


def sample_colder(trainer: Any) -> None:
    trainer.generation_config.temperature = 0.5


def move_reference(trainer: Any) -> None:
    import torch

    with torch.no_grad():
        for name, p in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
            if "up_proj" in name:
                (p.to_local() if hasattr(p, "to_local") else p).mul_(1.3)


def roll_advantages(trainer: Any) -> None:
    change_batches(trainer, lambda batch: {**batch, "advantages": batch["advantages"].roll(1)})


def keep_gradients(trainer: Any) -> None:
    """Leave out the sum of the gradients over the processes."""
    real = trainer.training_step

    def step_alone(model: Any, *args: Any, **how: Any) -> Any:
        with model.no_sync():
            return real(model, *args, **how)

    trainer.training_step = step_alone


FAULTS = {
    "temperature": sample_colder,
    "reference": move_reference,
    "advantages": roll_advantages,
    "no sync": keep_gradients,
}


def inject(trainer: Any, fault: str | None, rank: int) -> None:
    """Put a fault into a trainer; those that end in " on one" only into rank 1."""
    if fault is not None and not (fault.endswith(" on one") and rank == 0):
        FAULTS[fault.removesuffix(" on one")](trainer)


def train(case: dict[str, Any], folder: Path, start: Path, *, attach: bool) -> dict[str, Any]:
    from rich.console import Console

    import klinic
    from integrations.trainers import make_trainer
    from klinic.errors import RunStoppedError

    settings = dict(case.get("settings", {}))
    trainer = make_trainer(start, folder / "out", peft=case.get("peft", False), **settings)
    rank, said = trainer.accelerator.process_index, io.StringIO()
    if attach:
        options = dict(case.get("options", {}))
        if "kl" in options:
            options["kl"] = klinic.KL(**options["kl"])
        if "recovery" in options:
            options["recovery"] = klinic.Recovery(**options["recovery"])
        console = Console(file=said, width=500)
        klinic.attach(trainer, folder / "run", console=console, **options)
    inject(trainer, case.get("fault"), rank)
    stopped = None
    try:
        trainer.train()
    except RunStoppedError as error:
        stopped = str(error)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "digest": digest_of(trainer),
        "said": said.getvalue(),
        "stopped": stopped,
        "kind": str(trainer.accelerator.distributed_type),
        "logs": logs,
    }


def main(plan: Path) -> None:
    warnings.filterwarnings("ignore")
    task = json.loads(plan.read_text())
    import torch

    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_accelerate_shard_on_cpus()
    results: dict[str, Any] = {}
    for name, case in task["cases"].items():
        for way in case.get("ways", ["plain", "attached"]):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            folder = Path(task["folder"]) / name / way
            found = train(case, folder, Path(task["start"]), attach=way == "attached")
            every: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, found)
            results.setdefault(name, {})[way] = every
    if int(os.environ["RANK"]) == 0:
        (Path(task["folder"]) / "results.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks are not waited for
