"""TRL with the real engine of vLLM in its process, and klinic attached to both.

A process of its own for each run: the engine leaves its process as it likes it. TRL's own way to
hand over weights does not know a build for CPUs, which packs them when it has loaded them; vLLM's
way to load them once more stands in for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from klinic.evidence import store

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

AROUND = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SCRIPT = """
import sys
from trl.generation.vllm_generation import VLLMGeneration
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
import klinic
from integrations.trainers import make_trainer

start, folder, how = sys.argv[1:]


def sync_weights(self):
    if how == "stale":
        return
    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    model = runner.get_model()
    initialize_layerwise_reload(model)
    for name, weight in self._iter_named_params():
        model.load_weights([(name, weight.detach().clone())])
    finalize_layerwise_reload(model, runner.model_config)
    dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
    self.llm.reset_prefix_cache()


VLLMGeneration.sync_weights = sync_weights
trainer = make_trainer(
    start,
    folder + "/out",
    max_steps=3,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_max_model_length=64,
    vllm_gpu_memory_utilization=0.1,
    per_device_train_batch_size=32,
    learning_rate=1e-3 if how == "stale" else 3e-4,  # at 1e-3 a healthy policy is soon worse
    gradient_accumulation_steps=2,
)
klinic.attach(trainer, folder + "/run")
trainer.train()
"""


def run_of(start: Path, folder: Path, how: str) -> str:
    """Train a few steps; return what was printed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(start), str(folder), how],
        env={**os.environ, **AROUND, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_run_that_is_well_is_recorded_with_what_vllm_was_sent(taught, tmp_path):
    said = run_of(taught, tmp_path, "synced")
    assert "3 steps examined: no cause was found" in said
    for step in (1, 2, 3):
        record = store.read_record(tmp_path / "run", step)
        assert record.prompt_ids_match.all()
        assert record.cached_tokens is not None
        assert record.logp_sampler is not None


def test_an_engine_that_keeps_its_first_weights_is_named(taught, tmp_path):
    assert "Cause: stale-sampler" in run_of(taught, tmp_path, "stale")
