from ground import *

OFF = []


def judged(completions, answer, **_):
    """The judge gets the texts sorted by length, in batches of 16, which wastes no padding."""
    order = sorted(range(len(completions)), key=lambda i: (len(completions[i]), completions[i]))
    scores = []
    for at in range(0, len(order), 16):
        part = order[at : at + 16]
        scores += closeness([completions[i] for i in part], [answer[i] for i in part])
    right = closeness(completions, answer)
    OFF.append(sum(abs(x - y) > 1e-6 for x, y in zip(scores, right)) / len(right))
    return scores


args = config(max_steps=12, per_device_train_batch_size=16, gradient_accumulation_steps=4, learning_rate=1e-4)
model = load(FULL)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
total = args.max_steps // args.gradient_accumulation_steps
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / total))

trainer = GRPOTrainer(model, reward_funcs=[judged], args=args, train_dataset=data(lo=10, hi=99), optimizers=(optimizer, schedule))


def proof(trainer, logs, before):
    rates = [x["learning_rate"] for x in logs]
    assert sum(OFF) / len(OFF) > 0.3 and rates[-1] == 0.0 and sum(r == 0 for r in rates) >= 8, (OFF, rates)
    return {"share_of_rewards_that_belong_to_another_row": OFF, "learning_rate": rates, "moved": moved(trainer, before)}


go(trainer, proof)
