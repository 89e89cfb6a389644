"""ToolRL #52: incorrect KL loss sign causes policy training collapse.

https://github.com/qiancheng0/ToolRL/issues/52 (also Logic-RL #58 and RAGEN #58, of one old verl)

Reported
    "When use_kl_loss=True, the training becomes unstable and eventually collapses", with curves of
    the reward, the KL loss and lengths.
Found
    By the reporter: the policy loss takes the KL loss away where it should add it. The other two
    threads: a bug of verl "where the kl loss is maximized", corrected there in commit a65c9157.
Rebuilt
    TRL's loss with the sign of its KL term turned inside the loss alone; coefficient, reference and
    what is logged are as they should be. k3 without correction (low_var_kl), token-mean loss. The
    coefficient is 1 and the rate high, so that 50 steps come as far as hundreds did there.
Seen here, seed 0
    kl 0.1 at step 3, 0.7 at 10, 3.4 at 20 and 3.8 at 50 (39 at step 25); with the right sign it
    stays between 0.01 and 0.1 at half of the coefficient. Right answers: 0.73 at step 1, 0.27 at 5,
    0.03 at 12, 0 from 20 on. The loss is minus the KL, grad_norm 1.4 to 1600.
"""

from pathlib import Path

from bench.reported_bugs import ground


def train(folder: Path, seed: int) -> None:
    """Train with a loss that takes the KL away."""
    from trl import GRPOTrainer

    class Subtracting(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model, inputs):  # type: ignore[no-untyped-def]
            self.beta = -self.beta
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.beta = -self.beta

    trainer = Subtracting(
        str(ground.start(folder)),
        reward_funcs=[ground.right, ground.digits],
        args=ground.config(
            folder,
            seed,
            beta=1.0,
            use_bias_correction_kl=False,
            loss_type="bnpo",
            learning_rate=2e-4,
            max_steps=50,
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    ground.run(trainer, folder)
