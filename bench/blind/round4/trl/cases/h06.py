from ground import *


def scaled(completions, answer, **_):
    return [10.0 * s - 7.0 for s in closeness(completions, answer)]


trainer = GRPOTrainer(
    FULL, reward_funcs=[scaled], train_dataset=data(lo=10, hi=99),
    args=config(
        max_steps=12, importance_sampling_level="sequence", num_iterations=3, temperature=0.8, top_k=20, sync_ref_model=True, ref_model_sync_steps=3,
        ref_model_mixup_alpha=0.6, epsilon=0.05, epsilon_high=0.05, learning_rate=3e-5, beta=0.05,
    ),
)
REF = {n: p.detach().clone() for n, p in trainer.ref_model.named_parameters()}


def proof(trainer, logs, before):
    far = max(float((p - REF[n]).abs().max()) for n, p in trainer.ref_model.named_parameters())
    assert far > 1e-5, far
    return {"reference_moved": far}


go(trainer, proof)
