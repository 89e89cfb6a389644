"""Generation in an engine of one's own (a second copy of the model), through rollout_func."""
from ground import *

engine = load(EARLY).eval()
LAG = []


def push_weights(model):
    state = {k: v for k, v in model.state_dict().items() if k.startswith("model.layers.")}
    engine.load_state_dict(state, strict=False)
    LAG.append(float((engine.model.embed_tokens.weight - model.model.embed_tokens.weight).abs().max()))


def rollout(prompts, trainer):
    push_weights(trainer.accelerator.unwrap_model(trainer.model))
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    completions, logps = sample(engine, trainer.processing_class, prompt_ids, trainer.temperature, trainer.max_completion_length)
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}


trainer = GRPOTrainer(model=EARLY, reward_funcs=closeness, args=config(max_steps=18, learning_rate=5e-4), train_dataset=data(seed=9), rollout_func=rollout)


def proof(trainer, logs, before):
    assert LAG[-1] > 1e-3 and LAG[0] == 0.0
    return {"largest difference of an embedding between engine and learner, by step": LAG}


go(trainer, proof)
