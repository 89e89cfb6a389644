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

# of a training; then the stacks of all threads are printed and the process exits
HANG_SECONDS = int(os.environ.get("KLINIC_HANG_SECONDS", "240"))


def let_accelerate_shard_on_cpus() -> None:
    """Let accelerate use FSDP2 and DeepSpeed on CPUs, which it does on accelerators only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    real = state.AcceleratorState.__init__

    def init(
        self: Any, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **how: Any
    ) -> None:
        real(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **how)
        if self.distributed_type != DistributedType.MULTI_CPU:
            return
        if deepspeed_plugin is not None:
            use_deepspeed(self, deepspeed_plugin)
        elif fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    def use_deepspeed(self: Any, plugins: Any) -> None:
        self.distributed_type = DistributedType.DEEPSPEED
        every = list(plugins.values()) if isinstance(plugins, dict) else [plugins]
        for plugin in every:
            plugin.set_mixed_precision("no")
        every[0].select(_from_accelerator_state=True)
        self.deepspeed_plugins = plugins

    state.AcceleratorState.__init__ = init


def compile_nothing() -> None:
    """Let DeepSpeed do without its C++ for CPUs, which takes minutes to compile."""
    from importlib import import_module

    import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def forget_accelerator() -> None:
    """Let the next trainer have a DeepSpeed plugin of its own."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def zero_config(stage: int) -> dict[str, Any]:
    """Return a DeepSpeed config; at stage 3 every weight is split, however small."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": 2}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # its own Adam for CPUs must be compiled
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def digest_of(trainer: Any) -> str:
    from klinic.model.weights import full_tensor

    total = hashlib.sha256()
    for _, p in trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters():
        total.update(full_tensor(p).detach().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def change_batches(trainer: Any, change: Any) -> None:
    """Change every scored batch of a trainer."""
    real = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: change(real(inputs))


def sample_colder(trainer: Any) -> None:
    trainer.generation_config.temperature = 0.5


def move_reference(trainer: Any) -> None:
    import torch

    from klinic.integrations.trl.sharding import local_shard

    with torch.no_grad():
        for name, p in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
            if "up_proj" in name:
                local_shard(p).mul_(1.3)


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


def pay_by_chance(completions: Any, **_: Any) -> list[float]:
    """Pay equal completions differently."""
    import random

    return [random.uniform(0, 6) for _ in completions]  # noqa: S311 - a fault


def faults_of_one_process() -> dict[str, Any]:
    """Return klinic's own faults of TRL, by cause."""
    from klinic.faults.in_trl import TRL_FAULTS

    return {fault.cause: fault for fault in reversed(TRL_FAULTS)}


def inject(trainer: Any, fault: str | None, rank: int, *, is_attached: bool) -> None:
    """Put a fault into a trainer; those that end in " on one" only into rank 1.

    Faults of this file act on an attached trainer, klinic's own are in it before.
    """
    if fault is None or (fault.endswith(" on one") and rank == 0):
        return
    name = fault.removesuffix(" on one")
    if name in FAULTS and is_attached:
        FAULTS[name](trainer)
    elif name in faults_of_one_process() and not is_attached:
        faults_of_one_process()[name].sabotage(trainer)


def fault_settings(fault: str | None) -> dict[str, Any]:
    """Return the arguments of the trainer that a fault changes."""
    if fault == "reward by chance":
        return {"reward": pay_by_chance}
    found = faults_of_one_process().get(fault or "")
    if found is None:
        return {}
    return {**found.settings, **({} if found.reward is None else {"reward": found.reward})}


def train(case: dict[str, Any], folder: Path, start: Path, *, attach: bool) -> dict[str, Any]:
    from rich.console import Console

    import klinic
    from integrations.trainers import make_trainer
    from klinic.errors import RunStoppedError

    stage = int(os.environ.get("KLINIC_ZERO", "0"))
    zero = {"deepspeed": zero_config(stage)} if stage else {}
    settings = {**case.get("settings", {}), **fault_settings(case.get("fault")), **zero}
    trainer = make_trainer(start, folder / "out", peft=case.get("peft", False), **settings)
    rank, said = trainer.accelerator.process_index, io.StringIO()
    inject(trainer, case.get("fault"), rank, is_attached=False)
    if attach:
        options = dict(case.get("options", {}))
        if "kl" in options:
            options["kl"] = klinic.KL(**options["kl"])
        if "recovery" in options:
            options["recovery"] = klinic.Recovery(**options["recovery"])
        console = Console(file=said, width=500)
        klinic.attach(trainer, folder / "run", console=console, **options)
    inject(trainer, case.get("fault"), rank, is_attached=True)
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
    is_zero = "KLINIC_ZERO" in os.environ
    if is_zero or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_accelerate_shard_on_cpus()
    if is_zero:
        compile_nothing()
    results: dict[str, Any] = {}
    for name, case in task["cases"].items():
        for way in case.get("ways", ["plain", "attached"]):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            folder = Path(task["folder"]) / name / way
            if is_zero:
                forget_accelerator()
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
