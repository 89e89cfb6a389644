"""Runs verl 0.9.1 on CPUs for a few steps, with or without klinic and with or without a fault.

    KLINIC_VERL_PYTHON=ENV/bin/python python tests/integrations/verl_runs/launch.py FOLDER \
        [--faults NAME,NAME] [--ranks 2] [--steps 6] [--agent] [--bf16] [--without-klinic] \
        [--sorted-rows] [verl overrides]

The environment of that interpreter has verl and the dependencies of klinic:

    pip install torch==2.13.0 verl==0.9.1 transformers==5.9.0 TransferQueue==0.1.11 \
        "tensordict<=0.10.0" "ray[default]==2.60.0" pyzmq msgspec cachetools fastapi uvicorn nvtx \
        pytest pytest-asyncio jaxtyping typer rich
    pip uninstall -y aiohttp_cors

Without the last package Ray starts its small agents, which import less.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
CLASS = "klinic.integrations.verl.KlinicCallback"
RESTARTS = "verl_restarts.TrainWithEachFault"
FAULTS = {
    "shifted-logp": "misaligned-logp",
    "temperature": "temperature-on-one-side",
    "skipped-sync": "stale-sampler",
    "wrong-groups": "wrong-groups",
    "noisy-reward": "broken-reward",
    "bf16": "imprecise-logp",
    "stop-token": "stop-token-fault",
    "environment-tokens": "wrong-loss-mask",
}
"""Faults, and the cause that klinic names."""
RAY_SECONDS = (
    "RAY_worker_register_timeout_seconds",
    "RAY_gcs_server_request_timeout_seconds",
    "RAY_raylet_start_wait_time_s",
)
RAY_MILLISECONDS = (
    "RAY_health_check_initial_delay_ms",
    "RAY_health_check_timeout_ms",
    "RAY_agent_register_timeout_ms",
)
"""Limits of Ray that a busy machine exceeds."""
AGENTS = "- name: calculator\n  _target_: verl_calculator.CalculatorLoop\n"
METRIC = re.compile(r"(?:^| )([\w/@.-]+):(?:np\.float\d+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)")


@dataclass(frozen=True)
class Launch:
    """One run: its fault, its size, and further settings of verl."""

    faults: tuple[str, ...] = ()
    """Trainings that follow each other in the same processes, each with its fault and folder."""
    ranks: int = 1
    steps: int = 6
    klinic: bool = True
    agent: bool = False
    """Whether episodes have two turns, with a tool between them."""
    has_bf16: bool = False
    """Whether the learner computes in bf16, as verl does by default."""
    has_sorted_rows: bool = False
    """Whether the rows of a step have a fixed order, so that equal runs have equal sums."""
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The console of a run, and verl's metrics of every step."""

    text: str
    returncode: int
    metrics: list[dict[str, float]]


def overrides(folder, launch):
    """Return the configuration of a run."""
    data, fsdp = data_folder(folder), "fsdp_config"
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    values = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": launch.ranks,
        "trainer.nnodes": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": launch.steps,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 24 if launch.agent else 10,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": data / "model",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{ref}.strategy": "fsdp2",
        f"{actor}.{fsdp}.model_dtype": "fp32",
        f"{actor}.use_torch_compile": False,
        f"{actor}.{fsdp}.use_torch_compile": False,
        f"{ref}.{fsdp}.use_torch_compile": False,
        f"{actor}.optim.lr": 2e-5 if launch.has_bf16 else 3e-4,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.01,
        f"{actor}.ppo_mini_batch_size": 8,
        f"{actor}.ppo_micro_batch_size_per_gpu": 32,
        f"{ref}.log_prob_micro_batch_size_per_gpu": 32,
        f"{rollout}.name": "hf",
        f"{rollout}.n": 8,
        f"{rollout}.tensor_model_parallel_size": launch.ranks,
        f"{rollout}.dtype": "float32",
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 32,
        f"{rollout}.agent.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "verl_faults.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": launch.ranks,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    for part in (actor, ref) * (not launch.has_bf16):
        values[f"+{part}.{fsdp}.mixed_precision.param_dtype"] = "fp32"
    if launch.agent:
        (folder / "agents.yaml").write_text(AGENTS)
        values[f"{rollout}.agent.agent_loop_config_path"] = folder / "agents.yaml"
        values[f"{rollout}.agent.default_agent_loop"] = "calculator"
    if launch.has_sorted_rows:
        values["trainer.v1.sampler.custom_sampler.path"] = HERE / "sorted_rows.py"
        values["trainer.v1.sampler.custom_sampler.name"] = "SortedRows"
    if launch.klinic:
        values["trainer.checkpoint_callback_class"] = CLASS
        values["+klinic.folder"] = folder / "klinic"
    if launch.faults:
        values["trainer.checkpoint_callback_class"] = RESTARTS
    return [f"{key}={value}" for key, value in values.items()]


def data_folder(folder):
    """Return the folder of model and prompts, which runs in one folder share."""
    return folder.parent / "data"


def environment(folder, launch):
    fault_file = folder / "fault"
    fault_file.write_text("healthy")
    path = os.pathsep.join([str(HERE), str(SOURCE)])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "KLINIC_FAULT_FILE": str(fault_file),
        "KLINIC_FAULTS": ",".join(launch.faults),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",  # verl starts all that it needs
        "RAY_worker_niceness": "0",  # 15 by default: other programs then starve a run
        **dict.fromkeys(RAY_SECONDS, "600"),
        **dict.fromkeys(RAY_MILLISECONDS, "600000"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run_verl(python, folder, launch):
    """Train, and return what verl printed."""
    folder.mkdir(parents=True, exist_ok=True)
    data = data_folder(folder)
    if not (data / "val.parquet").exists():
        subprocess.run([python, HERE / "tiny_model.py", data], check=True)
    options = overrides(folder, launch)
    console = folder / "console.log"
    with console.open("w") as stream:
        done = subprocess.run(
            [python, "-m", "verl.trainer.main_ppo", *options, *launch.more],
            cwd=folder,
            env=environment(folder, launch),
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = console.read_text()
    lines = [line for line in text.splitlines() if "step:" in line and "actor/" in line]
    metrics = [{name: float(value) for name, value in METRIC.findall(line)} for line in lines]
    return Outcome(text=text, returncode=done.returncode, metrics=metrics)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", default="")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--agent", action="store_true")
    parser.add_argument("--without-klinic", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sorted-rows", action="store_true")
    options, more = parser.parse_known_args()
    outcome = run_verl(
        os.environ["KLINIC_VERL_PYTHON"],
        options.folder.resolve(),
        Launch(
            faults=tuple(filter(None, options.faults.split(","))),
            ranks=options.ranks,
            steps=options.steps,
            klinic=not options.without_klinic,
            has_bf16=options.bf16,
            has_sorted_rows=options.sorted_rows,
            agent=options.agent,
            more=tuple(more),
        ),
    )
    said = [line for line in outcome.text.splitlines() if "klinic |" in line]
    sys.stdout.write("\n".join([f"return code {outcome.returncode}", *said]) + "\n")
    for line in outcome.metrics:
        shown = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean")
        sys.stdout.write(" ".join(f"{name} {line.get(name)}" for name in shown) + "\n")


if __name__ == "__main__":
    main()
