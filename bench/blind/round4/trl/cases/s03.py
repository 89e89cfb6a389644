from ground import *

SEEN = []


def rollout(prompts, trainer):
    """Two tries: a wrong first answer is commented on by the environment, then the model answers again."""
    tok, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    contexts = [tok(p)["input_ids"] for p in prompts]
    first, lp = sample(model, tok, contexts, 1.0, 6)
    completions, logps = [list(c) for c in first], [list(x) for x in lp]
    again = []
    for i, (p, c) in enumerate(zip(prompts, first)):
        a, b = p.rstrip("=").split("+")
        if tok.decode(c, skip_special_tokens=True).strip() != str(int(a) + int(b)):
            told = tok(f"\nwrong. {p}")["input_ids"]
            completions[i] += told
            logps[i] += [0.0] * len(told)
            again.append(i)
            SEEN.append(len(told))
    if again:
        second, lp2 = sample(model, tok, [contexts[i] + completions[i] for i in again], 1.0, 6)
        for i, c, x in zip(again, second, lp2):
            completions[i] += c
            logps[i] += x
    SEEN.append(-sum(map(len, completions)))
    return {"prompt_ids": contexts, "completion_ids": completions, "logprobs": logps}


def last_try(completions, answer, **_):
    return closeness([c.split("=")[-1] for c in completions], answer)


def last_number(text):
    return number(text.split("=")[-1])


trainer = GRPOTrainer(FULL, reward_funcs=[last_try], args=config(max_steps=10, max_completion_length=32, learning_rate=5e-5), train_dataset=data(), rollout_func=rollout)


def proof(trainer, logs, before):
    told, total = sum(x for x in SEEN if x > 0), -sum(x for x in SEEN if x < 0)
    batch = trainer._buffered_inputs[0]
    trained = int(batch["completion_mask"].sum())
    assert "tool_mask" not in batch and told / total > 0.15, (told, total)
    return {"share_of_trained_tokens_from_environment": told / total, "trained_tokens_last_batch": trained}


go(trainer, proof, parse=last_number)
