from ground import *
from peft import LoraConfig

ENGINE = load(FULL).eval()
START = {k: v.clone() for k, v in ENGINE.state_dict().items()}
GAP = []


def push_weights(model):
    state = {k.removeprefix("base_model.model."): v for k, v in model.state_dict().items()}
    ENGINE.load_state_dict(state, strict=False)


def rollout(prompts, trainer):
    tok = trainer.processing_class
    push_weights(trainer.accelerator.unwrap_model(trainer.model))
    contexts = [tok(p)["input_ids"] for p in prompts]
    ids, logps = sample(ENGINE, tok, contexts, trainer.temperature, trainer.max_completion_length)
    one = torch.tensor([contexts[0] + ids[0]])
    with torch.no_grad():
        now = trainer.model(input_ids=one).logits.log_softmax(-1)[0, len(contexts[0]) - 1 : -1].gather(-1, torch.tensor(ids[0])[:, None])[:, 0]
    GAP.append(float((now - torch.tensor(logps[0])).abs().mean()))
    return {"prompt_ids": contexts, "completion_ids": ids, "logprobs": logps}


trainer = GRPOTrainer(
    FULL, reward_funcs=[closeness], args=config(max_steps=12, learning_rate=1e-3, beta=0.0), train_dataset=data(), rollout_func=rollout,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)


def proof(trainer, logs, before):
    still = max(float((v - START[k]).abs().max()) for k, v in ENGINE.state_dict().items())
    far = moved(trainer, before)
    assert still == 0.0 and far > 1e-3 and GAP[0] < 1e-3 and max(GAP[-4:]) > 0.02, (still, far, GAP)
    return {"engine_moved": still, "adapter_moved": far, "gap": GAP}


go(trainer, proof)
