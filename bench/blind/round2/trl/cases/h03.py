"""Healthy: two turns in a rollout_func; what the environment writes between them is in the completion, masked by env_mask."""
from ground import *

MASKED = []


def rollout(prompts, trainer):
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    prompt_ids = tokenizer(prompts)["input_ids"]
    first, lp1 = sample(model, tokenizer, prompt_ids, trainer.temperature, 5)
    asked = []
    for p in prompts:  # the environment asks the same sum again, turned round
        a, b = p.rstrip("=").split("+")
        asked.append(tokenizer(f"{b}+{a}=")["input_ids"])
    second, lp2 = sample(model, tokenizer, [p + f + q for p, f, q in zip(prompt_ids, first, asked)], trainer.temperature, 5)
    out = {"prompt_ids": prompt_ids, "completion_ids": [], "logprobs": [], "env_mask": [], "turn_1": [], "turn_2": []}
    for f, q, s, x, y in zip(first, asked, second, lp1, lp2):
        out["completion_ids"].append(f + q + s)
        out["logprobs"].append(x + [float("nan")] * len(q) + y)  # no sampler ever scored the environment's tokens
        out["env_mask"].append([1] * len(f) + [0] * len(q) + [1] * len(s))
        out["turn_1"].append(tokenizer.decode(f, skip_special_tokens=True))
        out["turn_2"].append(tokenizer.decode(s, skip_special_tokens=True))
    MASKED.append(sum(map(len, asked)) / sum(map(len, out["completion_ids"])))
    return out


def turns(completions, answer, turn_1, turn_2, **_):
    return [0.5 * (x.strip() == a) + 0.5 * (y.strip() == a) for x, y, a in zip(turn_1, turn_2, answer)]


trainer = GRPOTrainer(model=FULL, reward_funcs=turns, args=config(max_steps=9, learning_rate=1e-4, max_completion_length=18), train_dataset=data(seed=73), rollout_func=rollout)


def proof(trainer, logs, before):
    assert min(MASKED) > 0.2 and "tool_mask" in trainer._buffered_inputs[0]
    return {"share of tokens that the environment wrote, by step": MASKED}


go(trainer, proof, parse=None)
