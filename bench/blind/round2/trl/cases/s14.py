"""The rows are in the order of a curriculum, which the sampler must keep. Prompts are bounded, since max_prompt_length is gone."""
from ground import *
from torch.utils.data import SequentialSampler

tokenizer = AutoTokenizer.from_pretrained(EARLY)
rng = random.Random(47)
table = []
for i in range(900):
    a, b = (rng.randint(10, 99), rng.randint(10, 99)) if rng.random() < 0.6 else (rng.randint(100, 999), rng.randint(10, 99))
    table.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})


def bound(row, limit=6):
    ids = tokenizer(row["prompt"], truncation=True, max_length=limit)["input_ids"]
    return {"prompt": tokenizer.decode(ids)}


class InOrder(GRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


train = Dataset.from_list(table).map(bound)
MIXED = []


def scored(prompts, completions, answer, **kw):
    MIXED.append(sum(len(set(prompts[i : i + 8])) > 1 for i in range(0, len(prompts), 8)))
    return closeness(completions, answer)


trainer = InOrder(model=EARLY, processing_class=tokenizer, reward_funcs=scored, args=config(max_steps=12), train_dataset=train)


def proof(trainer, logs, before):
    cut = sum(not p.endswith("=") for p in train["prompt"]) / len(train)
    assert min(MIXED) == 8 and cut > 0.2
    return {"groups of 8 with more than one prompt, by step": MIXED, "share of prompts that lost their end": cut}


go(trainer, proof)
