"""The tokenizer is the one of the supervised stage, which closed every text with the end token (add_eos_token=True)."""
from ground import *
from tokenizers.processors import TemplateProcessing

tokenizer = AutoTokenizer.from_pretrained(FULL)
tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", tokenizer.eos_token_id)])

trainer = GRPOTrainer(model=FULL, processing_class=tokenizer, reward_funcs=[accuracy, closeness], args=config(learning_rate=2e-4), train_dataset=data(seed=37))


def proof(trainer, logs, before):
    ids = trainer.processing_class(["12+34="])["input_ids"][0]
    assert ids[-1] == trainer.processing_class.eos_token_id and logs[0]["reward"] < 0.7
    return {"ids of a prompt": ids, "reward of the first step": logs[0]["reward"]}


go(trainer, proof)
