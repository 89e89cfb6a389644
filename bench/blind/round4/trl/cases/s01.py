from ground import *

CALLS = []


def rollout(prompts, trainer):
    """Eight sampling workers; worker w answers every eighth prompt of the batch."""
    tok, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    workers = trainer.num_generations
    contexts = [tok(p)["input_ids"] for p in prompts]
    ids, logps = [None] * len(prompts), [None] * len(prompts)
    for worker in range(workers):
        torch.manual_seed(trainer.args.seed + trainer.state.global_step)
        mine = range(worker, len(prompts), workers)
        got, lp = sample(model, tok, [contexts[i] for i in mine], trainer.temperature, trainer.max_completion_length)
        for i, g, l in zip(mine, got, lp):
            ids[i], logps[i] = g, l
    CALLS.append([ids[i : i + workers] for i in range(0, len(ids), workers)])
    return {"prompt_ids": contexts, "completion_ids": ids, "logprobs": logps}


trainer = GRPOTrainer(FULL, reward_funcs=[closeness], args=config(max_steps=9, learning_rate=1e-4), train_dataset=data(), rollout_func=rollout)


def proof(trainer, logs, before):
    same = [len({tuple(c) for c in group}) == 1 for call in CALLS for group in call]
    share = sum(same) / len(same)
    assert share == 1.0, share
    sizes = [float(b["advantages"].abs().max()) for b in trainer._buffered_inputs]
    assert max(sizes) < 0.01, sizes
    return {"share_of_groups_with_one_completion": share, "largest_advantage_last_batch": sizes}


go(trainer, proof)
