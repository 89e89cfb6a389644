from ground import *

SEEN = []


def rollout(prompts, trainer):
    """The model answers, the environment repeats the question, the model answers again."""
    tok, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    contexts = [tok(p)["input_ids"] for p in prompts]
    first, lp = sample(model, tok, contexts, trainer.temperature, 6)
    told = [tok(f"\n{p}")["input_ids"] for p in prompts]
    second, lp2 = sample(model, tok, [c + f + t for c, f, t in zip(contexts, first, told)], trainer.temperature, 6)
    SEEN.append((sum(map(len, told)), sum(map(len, first)) + sum(map(len, second))))
    return {
        "prompt_ids": contexts,
        "completion_ids": [f + t + s for f, t, s in zip(first, told, second)],
        "logprobs": [a + [0.0] * len(t) + b for a, t, b in zip(lp, told, lp2)],
        "env_mask": [[1] * len(f) + [0] * len(t) + [1] * len(s) for f, t, s in zip(first, told, second)],
    }


def both(completions, answer, **_):
    out = []
    for c, a in zip(completions, answer):
        one, two = c.split("\n")[0], c.split("=")[-1]
        out.append(0.5 * closeness([one], [a])[0] + 0.5 * closeness([two], [a])[0])
    return out


trainer = GRPOTrainer(FULL, reward_funcs=[both], args=config(max_steps=10, max_completion_length=32, loss_type="bnpo", learning_rate=5e-5), train_dataset=data(), rollout_func=rollout)


def proof(trainer, logs, before):
    batch = trainer._buffered_inputs[0]
    told, said = map(sum, zip(*SEEN))
    assert "tool_mask" in batch and told > 0.3 * said and int((batch["completion_mask"] * (1 - batch["tool_mask"])).sum()) == SEEN[-1][0], (told, said)
    return {"tokens_of_the_environment": told, "tokens_of_the_policy": said}


go(trainer, proof, parse=lambda text: number(text.split("=")[-1]))
