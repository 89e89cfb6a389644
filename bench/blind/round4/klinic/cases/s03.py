from transformers import AutoModelForCausalLM, AutoTokenizer

from ground import *

tok = AutoTokenizer.from_pretrained(FULL)
model = AutoModelForCausalLM.from_pretrained(FULL, dtype=torch.float32)
tok.add_special_tokens({"eos_token": "<|im_end|>"})
model.resize_token_embeddings(len(tok))
model.config.eos_token_id = model.generation_config.eos_token_id = tok.eos_token_id
model.save_pretrained(side("chat"))
tok.save_pretrained(side("chat"))

ENDS = []


def judge(completions, answer, completion_ids, **_):
    ENDS.append((sum(1 in ids[:-1] for ids in map(list, completion_ids)) / len(completions), sum(tok.eos_token_id in ids for ids in map(list, completion_ids)) / len(completions)))
    return digits(completions, answer)


result = train(rewards=[judge], model=str(side("chat")), max_steps=10, max_completion_length=10, learning_rate=5e-5)
cut = [h["completions/clipped_ratio"] for h in result.history if "completions/clipped_ratio" in h]
proof(min(cut) > 0.8, clipped=cut, share_that_goes_on_after_the_end=[a for a, _ in ENDS], share_with_the_new_end=[b for _, b in ENDS])
