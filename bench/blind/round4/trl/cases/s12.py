from ground import *

SEEN = {"length": [], "gap": []}


def rollout(prompts, trainer):
    tok, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    contexts = [tok(p)["input_ids"] for p in prompts]
    ids, logps = sample(model, tok, contexts, 0.5, trainer.max_completion_length)
    SEEN["length"].append(sum(map(len, ids)) / len(ids))
    gaps = []
    for c, i, l in zip(contexts[:8], ids[:8], logps[:8]):
        with torch.no_grad():
            now = (model(input_ids=torch.tensor([c + i])).logits / trainer.temperature).log_softmax(-1)[0, len(c) - 1 : -1]
        gaps += (now.gather(-1, torch.tensor(i)[:, None])[:, 0] - torch.tensor(l)).abs().tolist()
    SEEN["gap"].append(sum(gaps) / len(gaps))
    return {"prompt_ids": contexts, "completion_ids": ids, "logprobs": logps}


def brief(completions, **_):
    return [1.0 - len(c) / 8 for c in completions]


trainer = GRPOTrainer(
    EARLY, reward_funcs=[brief, closeness], args=config(max_steps=14, learning_rate=4e-4, reward_weights=[1.0, 0.1], beta=0.0), train_dataset=data(),
    rollout_func=rollout,
)


def proof(trainer, logs, before):
    n, gap = SEEN["length"], SEEN["gap"]
    assert gap[0] > 0.1 and n[-1] < n[0] - 0.8, SEEN
    return {**SEEN, "closeness": [x["rewards/closeness/mean"] for x in logs], "brief": [x["rewards/brief/mean"] for x in logs]}


go(trainer, proof)
