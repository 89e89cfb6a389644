"""TRL #5312: vLLM weights are not synchronized with vllm_enable_sleep_mode=True.

https://github.com/huggingface/trl/issues/5312 (fixes #5313 and #5355)

Reported
    With vllm_mode="colocate" and sleep mode GRPO training "seems not working": weights of the
    engine are not those of the policy. Another user, on GSM8K with rewards for correctness and
    format, 8 completions a prompt, 2 steps of warm-up and a rate raised to 1e-4:
    sampling_logp_difference/mean is 0.010 and 0.018 in the warm-up, then 0.201 at step 3, where it
    is 0.015 without sleep mode.
Found
    A maintainer confirmed a rollback: generate() wakes the engine and reloads its weights from
    disk, which overwrites what sync_weights() had just copied. The engine always draws with the
    weights that training began with.
Rebuilt
    TRL's trainer with a stand-in for vLLM (bfloat16, weights of its own) that reloads from disk
    whenever it is asked to generate. beta 0, rewards for correctness and format, 2 warm-up steps.
Seen here, seed 0
    sampling_logp_difference/mean is 0.003 at step 1, 0.022 at 2, 0.048 at 3, 0.12 at 10 and 0.38
    at 20; with an engine that keeps what it was given it is below 0.012 throughout.
    importance_sampling_ratio/mean goes from 1.00 to 0.75, 0.47 at its lowest. Right answers: 0.73
    at step 1, 0.62 at step 20 (0.89 with the other engine).
"""

from pathlib import Path
from typing import Any

from bench.reported_bugs import ground
from bench.reported_bugs.engine import Engine, use


class SleepyEngine(Engine):
    """An engine whose weights are discarded in its sleep, and read from disk when it wakes."""

    def generate(self, prompts: list[list[int]], **how: Any) -> tuple[Any, Any, Any, Any]:
        """Wake up, and draw."""
        self.lm = self._from_disk()
        return super().generate(prompts, **how)


def train(folder: Path, seed: int) -> None:
    """Train with an engine that goes back to the first weights before every generation."""
    from trl import GRPOTrainer

    path = ground.start(folder)
    trainer = GRPOTrainer(
        str(path),
        reward_funcs=[ground.right, ground.digits],
        args=ground.config(folder, seed, learning_rate=1e-4, warmup_steps=2, max_steps=20),
        train_dataset=ground.dataset(ground.questions()),
    )
    use(trainer, SleepyEngine(trainer, path))
    ground.run(trainer, folder)
