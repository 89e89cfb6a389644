"""A checkpoint callback that trains several times in the processes of one run of verl.

Starting verl takes minutes of processor time, a run of a few steps seconds. Every training starts
from the same weights, with a new optimizer and the first prompts, and has one fault or none.
klinic is attached anew to each except those named `without`; before the first other one, no module
of klinic is imported.
"""

import os
from pathlib import Path

import verl_faults
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync


class TrainWithEachFault:
    def __init__(self, config=None):
        verl_faults.patch_trainer()
        PPOTrainerSync.fit = fit_with_each_fault

    def on_save(self, *_, **__):
        pass


def fit_with_each_fault(trainer, agent_loop_manager):
    for fault in os.environ["KLINIC_FAULTS"].split(","):
        verl_faults.FILE.write_text(fault)
        restart(trainer)
        trainer.checkpoint_callback = make_callback(trainer.config, fault)
        print(f"training with {fault}", flush=True)  # noqa: T201 - the log of the run
        PPOTrainer.fit(trainer, agent_loop_manager)


def restart(trainer):
    """Bring trainer, learner and sampler back to the start."""
    trainer.actor_rollout_wg.load_checkpoint("the start")  # see verl_cpu_adapter
    trainer.global_steps = 0
    trainer.train_dataloader_it = None
    trainer._init_dump_executor()
    trainer.on_init_end()  # sends the weights to the sampler


def make_callback(config, fault):
    """Return klinic's callback with a folder of its own; None for a training without klinic."""
    if fault == "without":
        return None
    from klinic.integrations.verl import KlinicCallback

    plain = OmegaConf.to_container(config, resolve=True)
    folder = Path(plain["klinic"]["folder"]).with_name(fault)
    return KlinicCallback({**plain, "klinic": {"folder": str(folder)}})
