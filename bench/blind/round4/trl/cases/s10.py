from ground import *

tok = AutoTokenizer.from_pretrained(FULL)


def pack(row):
    """The same packing as in the supervised stage."""
    return {**row, "prompt": row["prompt"] + tok.eos_token}


trainer = GRPOTrainer(FULL, reward_funcs=[closeness], args=config(max_steps=12, learning_rate=1e-4), train_dataset=data().map(pack), processing_class=tok)


def proof(trainer, logs, before):
    last = trainer._buffered_inputs[0]["prompt_ids"][:, -1]
    rs = rows(n=64, seed=9)
    m = load(FULL)
    good = closeness(tok.batch_decode(sample(m, tok, [tok(r["prompt"])["input_ids"] for r in rs], 1.0, 8)[0], skip_special_tokens=True), [r["answer"] for r in rs])
    bad = closeness(tok.batch_decode(sample(m, tok, [tok(r["prompt"] + tok.eos_token)["input_ids"] for r in rs], 1.0, 8)[0], skip_special_tokens=True), [r["answer"] for r in rs])
    assert bool((last == tok.eos_token_id).all()) and sum(good) > sum(bad) + 5, (sum(good), sum(bad))
    return {"prompts_that_end_with_eos": 1.0, "reward_without": sum(good) / 64, "reward_with": sum(bad) / 64}


go(trainer, proof)
