"""What the cases share: tiny policies, a sampler, scoring, and four plain loops (right as they stand)."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import copy
import hashlib
import json
import random
import re
import sys

import torch
from torch import nn

torch.set_num_threads(1)
EARLY = os.environ["BLIND_EARLY"]
FULL = os.environ["BLIND_FULL"]


# ---------------------------------------------------------------- policies
class Recurrent(nn.Module):
    def __init__(self, vocabulary, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Attentive(nn.Module):
    def __init__(self, vocabulary, width=48, layers=2, heads=4, length=24):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        n = ids.size(1)
        hidden = self.embed(ids) + self.place(torch.arange(n))
        causal = torch.full((n, n), float("-inf")).triu(1)
        return self.head(self.norm(self.blocks(hidden, mask=causal)))


# ---------------------------------------------------------------- rows
def pad(rows, fill, dtype=torch.long):
    width = max(1, max(len(row) for row in rows))
    out = torch.full((len(rows), width), fill, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
        mask[i, : len(row)] = True
    return out, mask


def distribution(logits, allowed=None):
    """Log-probs over the tokens that a model may emit (padding never is)."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -1e9)
    return logits.log_softmax(-1)


def score(model, prompts, completions, temperature=1.0):
    """Log-prob and entropy of each token of the completions: arrays padded on the right."""
    ids, _ = pad([p + c for p, c in zip(prompts, completions)], 0)
    logp = (model(ids) / temperature).log_softmax(-1)
    targets, mask = pad(completions, 0)
    starts = torch.tensor([len(p) - 1 for p in prompts])[:, None]
    at = (starts + torch.arange(targets.size(1))).clamp(max=ids.size(1) - 1)
    rows = logp[torch.arange(len(prompts))[:, None], at]
    chosen = rows.gather(-1, targets[..., None])[..., 0]
    entropy = -(rows.exp() * rows).sum(-1)
    return chosen, entropy, mask


@torch.no_grad()
def sample(model, contexts, limit, stop, temperature=1.0):
    """Completions and the log-probs of the distribution that they were drawn from."""
    done = [False] * len(contexts)
    out, logps = [[] for _ in contexts], [[] for _ in contexts]
    for _ in range(limit):
        ids, mask = pad([c + o for c, o in zip(contexts, out)], 0)
        logits = model(ids)[torch.arange(len(contexts)), mask.sum(1) - 1] / temperature
        logp = logits.log_softmax(-1)
        token = logp.exp().multinomial(1)[:, 0]
        value = logp.gather(-1, token[:, None])[:, 0]
        for i in range(len(contexts)):
            if not done[i]:
                out[i].append(int(token[i]))
                logps[i].append(float(value[i]))
                done[i] = int(token[i]) in stop
        if all(done):
            break
    return out, logps


def supervise(model, make, steps, lr=3e-3, batch=64):
    """A short supervised start, so that the policy knows part of the task."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        pairs = [make() for _ in range(batch)]
        logp, _, mask = score(model, [p for p, _ in pairs], [c for _, c in pairs])
        loss = -(logp * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fingerprint(model):
    data = b"".join(v.detach().float().numpy().tobytes() for v in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def group_advantage(rewards, size, how):
    by = rewards.view(-1, size)
    centred = by - by.mean(1, keepdim=True)
    if how == "group_std":
        centred = centred / (by.std(1, keepdim=True) + 1e-4)
    if how == "leave_one_out":
        centred = centred * size / (size - 1)
    return centred.flatten()


def k3(logp, ref):
    return torch.exp(ref - logp) - (ref - logp) - 1


def seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class Base:
    """What all loops have: the recorder's call and the proof."""

    seed = 0

    def recorder(self, folder, **settings):
        import klinic

        settings.update(self.say)
        settings = {k: v for k, v in settings.items() if v != "leave out"}
        return klinic.Recorder(folder, doctor=os.environ.get("BLIND_DOCTOR", "none"), **settings)

    say = {}  # what a case tells of its own settings
    silent = ()  # what a lazy case does not record

    def warmed(self, model, lesson, steps):
        """The model after a short supervised start, which is kept in a file beside the cases."""
        file = os.path.join(os.environ["BLIND_OUT"], f"warm_{type(model).__name__.lower()}_{len(model.embed.weight)}_{steps}.pt")
        if not os.path.exists(file):
            supervise(model, lesson, steps)
            torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(file, weights_only=True))
        seed_all(self.seed + 1)
        return model

    def speak(self, **values):
        return {k: v for k, v in values.items() if k not in self.silent and v is not None}

    def prove(self):
        return {}

    def main(self):
        folder = sys.argv[1].rstrip("/")
        self.history = []
        seed_all(self.seed)
        self.train(folder)
        proof = self.prove()
        proof["rewards"] = [round(h["reward"], 3) for h in self.history]
        proof["kl"] = [round(h["kl"], 5) for h in self.history]
        proof["grad_norm"] = [round(h["grad"], 4) for h in self.history]
        with open(folder + ".proof.json", "w") as file:
            json.dump(proof, file, indent=1)
        print(json.dumps(proof))


# ---------------------------------------------------------------- A: repeat digits, one update per generation
class Echo(Base):
    P, G, LIMIT, STEPS, LR, BETA, T = 8, 8, 6, 10, 1e-3, 0.02, 1.0
    EOS, PAD, SEP, V = 10, 11, 12, 13
    WARM = 130
    ADVANTAGE = "group_std"

    def task(self):
        digits = [random.randrange(10) for _ in range(3)]
        return digits + [self.SEP], digits + [self.EOS]

    def policy_model(self):
        return self.warmed(Recurrent(self.V), self.task, self.WARM)

    def prompts(self):
        """The prompts of a step, each G times, and the index of the prompt of each row."""
        some = [self.task()[0] for _ in range(self.P)]
        return [p for p in some for _ in range(self.G)], torch.arange(self.P).repeat_interleave(self.G)

    def reward(self, prompt, completion):
        want = prompt[:-1] + [self.EOS]
        return sum(a == b for a, b in zip(completion, want)) / len(want)

    def advantages(self, rewards):
        return group_advantage(rewards, self.G, self.ADVANTAGE)

    def loss_mask(self, ids, mask):
        return mask

    def kl_coef(self, step, kl):
        return self.BETA

    def learning_rate(self, step):
        return self.LR

    def between(self, step):
        """After each update, such as a checkpoint."""

    def train(self, folder):
        self.policy = self.policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.LR)
        texts = {**{i: str(i) for i in range(10)}, self.PAD: "<pad>", self.EOS: "<eos>", self.SEP: "="}
        recorder = self.recorder(
            folder, temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=self.LIMIT,
            logprob_mode="processed", eos_ids=[self.EOS], pad_id=self.PAD, vocabulary_size=self.V, advantage=self.ADVANTAGE,
            group_size=self.G, loss="grpo", aggregation="sequence_mean", clip_low=0.2, kl_estimator="k3", dtype="fp32",
            dropout=0.0, num_experts=0, untrained=False, max_version_lag=0, updates_per_generation=1, shared_forward=True,
            max_steps=self.STEPS, warmup_steps=0, seed=self.seed, token_texts=texts,
        )
        kl_mean = 0.0
        for step in range(self.STEPS):
            prompts, group = self.prompts()
            completions, logp_sampler = sample(self.policy, prompts, self.LIMIT, {self.EOS}, self.T)
            rewards = torch.tensor([self.reward(p, c) for p, c in zip(prompts, completions)])
            recorder.record_samples(prompt_ids=prompts, completion_ids=completions, logp_sampler=logp_sampler, group=group, reward=rewards)
            advantage = self.advantages(rewards)
            logp, entropy, mask = score(self.policy, prompts, completions, self.T)
            with torch.no_grad():
                ref = score(self.reference, prompts, completions, self.T)[0]
                twice = (score(self.policy, prompts, completions, self.T)[0] - logp).abs()[mask].max().item()
                alone = (score(self.policy, prompts[:1], completions[:1], self.T)[0][0] - logp[0, : len(completions[0])]).abs().max().item()
            ids, _ = pad(completions, self.PAD)
            weights = self.loss_mask(ids, mask)
            ratio = (logp - logp.detach()).exp()
            policy_term = -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
            coef = self.kl_coef(step, kl_mean)
            per_token = policy_term + coef * k3(logp, ref)
            loss = ((per_token * weights).sum(1) / weights.sum(1).clamp(min=1)).mean()
            kl_mean = (k3(logp, ref).detach()[mask]).mean().item()
            rate = self.learning_rate(step)
            for g in self.optimizer.param_groups:
                g["lr"] = rate
            self.optimizer.zero_grad()
            loss.backward()
            grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
            before = flat(self.policy)
            self.optimizer.step()
            moved = (flat(self.policy) - before).norm().item()
            prompt_ids, prompt_mask = pad(prompts, self.PAD)
            recorder.record_step(
                prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=mask,
                **self.speak(
                    loss_mask=weights, logp=logp, logp_old=logp, logp_ref=ref, entropy=entropy, advantage=advantage, loss=loss.item(),
                    kl_coef=coef, entropy_coef=0.0, learning_rate=rate, grad_norm=grad, update_norm=moved, rescore_difference=twice,
                    rescore_alone_difference=alone,
                ),
            )
            self.history.append({"reward": rewards.mean().item(), "kl": kl_mean, "grad": grad, "moved": moved, "length": mask.sum(1).float().mean().item(),
                                 "stopped": sum(c[-1] == self.EOS for c in completions) / len(completions)})
            self.between(step)
        recorder.close()


# ---------------------------------------------------------------- B: sort digits, old policy, mini-batches, clipping
class Sort(Base):
    P, G, LIMIT, GENERATIONS, LR, BETA, T = 8, 8, 7, 4, 4e-4, 0.02, 1.0
    MINI, EPOCHS, LOW, HIGH = 2, 2, 0.2, 0.2
    EOS, PAD, SEP, V = 10, 11, 12, 13
    WARM = 80
    ADVANTAGE = "group_mean"

    def task(self):
        digits = [random.randrange(10) for _ in range(random.randint(3, 5))]
        return digits + [self.SEP], sorted(digits) + [self.EOS]

    def policy_model(self):
        return self.warmed(Attentive(self.V), self.task, self.WARM)

    def reward(self, prompt, completion):
        want = sorted(prompt[:-1]) + [self.EOS]
        return sum(a == b for a, b in zip(completion, want)) / len(want)

    def advantages(self, rewards):
        return group_advantage(rewards, self.G, self.ADVANTAGE)

    def loss_masks(self, completions, mask):
        return mask.clone()

    def keep(self, rewards):
        """Indices of the rows that are trained on."""
        return list(range(len(rewards)))

    def split(self, rows):
        """Mini-batches of whole groups, in random order."""
        groups = [rows[i : i + self.G] for i in range(0, len(rows), self.G)]
        random.shuffle(groups)
        size = -(-len(groups) // self.MINI)
        return [sum(groups[i : i + size], []) for i in range(0, len(groups), size)]

    def make_schedule(self):
        updates = self.GENERATIONS * self.MINI * self.EPOCHS
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: max(0.0, 1 - k / updates))

    def old(self, stored, logp, rows):
        return stored

    def clear(self):
        self.optimizer.zero_grad()

    def train(self, folder):
        self.policy = self.policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.LR, weight_decay=0.01)
        schedule = self.make_schedule()
        texts = {**{i: str(i) for i in range(10)}, self.PAD: "<pad>", self.EOS: "<eos>", self.SEP: "="}
        recorder = self.recorder(
            folder, temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=self.LIMIT,
            logprob_mode="processed", eos_ids=[self.EOS], pad_id=self.PAD, vocabulary_size=self.V, advantage=self.ADVANTAGE,
            group_size=self.G, loss="dapo", aggregation="token_mean", clip_low=self.LOW, clip_high=self.HIGH, kl_estimator="k3", dtype="fp32",
            dropout=0.0, untrained=False, max_version_lag=0, updates_per_generation=self.MINI * self.EPOCHS, shared_forward=False,
            max_steps=self.GENERATIONS * self.MINI * self.EPOCHS, warmup_steps=0, seed=self.seed, token_texts=texts,
        )
        self.ratios = []
        for _ in range(self.GENERATIONS):
            prompts = [p for p in [self.task()[0] for _ in range(self.P)] for _ in range(self.G)]
            group = torch.arange(self.P).repeat_interleave(self.G)
            completions, logp_sampler = sample(self.policy, prompts, self.LIMIT, {self.EOS}, self.T)
            rewards = torch.tensor([self.reward(p, c) for p, c in zip(prompts, completions)], dtype=torch.float32)
            recorder.record_samples(prompt_ids=prompts, completion_ids=completions, logp_sampler=logp_sampler, group=group, reward=rewards)
            advantages = self.advantages(rewards)
            with torch.no_grad():
                logp_old, _, mask = score(self.policy, prompts, completions, self.T)
                logp_ref = score(self.reference, prompts, completions, self.T)[0]
            masks = self.loss_masks(completions, mask)
            kept = self.keep(rewards)
            for _ in range(self.EPOCHS):
                for rows in self.split(kept):
                    P, C = [prompts[i] for i in rows], [completions[i] for i in rows]
                    logp, entropy, here = score(self.policy, P, C, self.T)
                    width = here.size(1)
                    ref, weights, advantage = logp_ref[rows, :width], masks[rows, :width], advantages[rows]
                    old = self.old(logp_old[rows, :width], logp, rows)
                    ratio = (logp - old).exp()
                    clipped = ratio.clamp(1 - self.LOW, 1 + self.HIGH)
                    per_token = -torch.min(ratio * advantage[:, None], clipped * advantage[:, None]) + self.BETA * k3(logp, ref)
                    tokens = weights.sum().clamp(min=1)
                    loss = (per_token * weights).sum() / tokens
                    self.clear()
                    loss.backward()
                    grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
                    rate = self.optimizer.param_groups[0]["lr"]
                    before = flat(self.policy)
                    self.optimizer.step()
                    schedule.step()
                    moved = (flat(self.policy) - before).norm().item()
                    self.ratios.append((ratio.detach()[here] - 1).abs().max().item())
                    ids, _ = pad(C, self.PAD)
                    prompt_ids, prompt_mask = pad(P, self.PAD)
                    recorder.record_step(
                        prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=here,
                        **self.speak(
                            loss_mask=weights, group=group[rows], logp=logp, logp_old=old, logp_ref=ref, entropy=entropy, reward=rewards[rows],
                            advantage=advantage, loss=loss.item(), loss_denominator=float(tokens), kl_coef=self.BETA, entropy_coef=0.0,
                            learning_rate=rate, grad_norm=grad, update_norm=moved,
                        ),
                    )
                    self.history.append({"reward": rewards[rows].mean().item(), "kl": k3(logp, ref).detach()[here].mean().item(), "grad": grad,
                                         "moved": moved, "rate": rate, "rows": len(rows)})
        recorder.close()


# ---------------------------------------------------------------- C: a separate sampler, two turns with a tool
class Tool(Base):
    P, G, STEPS, LR, BETA, T = 8, 8, 10, 1e-3, 0.02, 1.0
    LIMIT = 4  # tokens of a turn
    EOS, PAD, ASK, CALL, END, OUT, SAY, V = 10, 11, 12, 13, 14, 15, 16, 17
    WARM = 150
    LENGTH = 12  # constant divisor of the loss

    def task(self):
        return [random.randrange(10), random.randrange(10), self.ASK]

    def tool(self, prompt, turn):
        """The reply of the calculator, or None if it was not called."""
        if turn and turn[-1] == self.END and self.CALL in turn:
            total = prompt[0] + prompt[1]
            return [self.OUT, total // 10, total % 10, self.SAY]
        return None

    def lesson(self):
        prompt = self.task()
        if random.random() < 0.4:  # guesses without the tool
            return prompt, [random.randrange(2), random.randrange(10), self.EOS]
        reply = self.tool(prompt, [self.CALL, self.END])
        answer = reply[1:3] if random.random() < 0.7 else [random.randrange(2), random.randrange(10)]
        return prompt, [self.CALL, self.END] + reply + answer + [self.EOS]

    def policy_model(self):
        return self.warmed(Recurrent(self.V), self.lesson, self.WARM)

    def reward(self, prompt, turns):
        total = prompt[0] + prompt[1]
        said = turns[-1]
        return (1.0 if said == [total // 10, total % 10, self.EOS] else 0.0) + (0.2 if len(turns) > 1 else 0.0)

    def advantages(self, rewards):
        return group_advantage(rewards, self.G, "leave_one_out")

    def make_reference(self):
        return copy.deepcopy(self.policy).requires_grad_(False)

    def publish(self, step):
        """Send the learner's weights to the sampler; returns the version of the weights."""
        self.sampler.load_state_dict(self.policy.state_dict())
        return step

    def hashes(self):
        return {"weights_published": fingerprint(self.policy), "weights_loaded": fingerprint(self.sampler)}

    def loss_mask(self, emitted, mask):
        return mask & (emitted == 0)

    def learner_temperature(self):
        return self.T

    def entropy_coef(self):
        return 0.0

    def importance(self, logp, logp_sampler):
        return 1.0

    def train(self, folder):
        self.policy = self.policy_model()
        self.sampler = copy.deepcopy(self.policy).requires_grad_(False)
        self.reference = self.make_reference()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.LR)
        names = {self.PAD: "<pad>", self.EOS: "<eos>", self.ASK: "?", self.CALL: "<call>", self.END: "<end>", self.OUT: "<out>", self.SAY: "<say>"}
        recorder = self.recorder(
            folder, temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=2 * self.LIMIT,
            logprob_mode="processed", eos_ids=[self.EOS, self.END], pad_id=self.PAD, vocabulary_size=self.V, advantage="leave_one_out",
            group_size=self.G, loss="dr_grpo", aggregation="constant", clip_low=0.2, clip_high=0.2, kl_estimator="k3", dtype="fp32",
            dropout=0.0, untrained=False, max_version_lag=0, updates_per_generation=1, shared_forward=True, max_steps=self.STEPS,
            warmup_steps=0, seed=self.seed, token_texts={**{i: str(i) for i in range(10)}, **names},
        )
        for step in range(self.STEPS):
            version = self.publish(step)
            prompts = [p for p in [self.task() for _ in range(self.P)] for _ in range(self.G)]
            group = torch.arange(self.P).repeat_interleave(self.G)
            # the first turn
            first, first_logp = sample(self.sampler, prompts, self.LIMIT, {self.END, self.EOS}, self.T)
            recorder.record_samples(prompt_ids=prompts, completion_ids=first, logp_sampler=first_logp, group=group, weight_version=version)
            turns, rows = [[t] for t in first], [list(t) for t in first]
            emitted = [[0] * len(t) for t in first]
            logp_sampler = [list(v) for v in first_logp]
            replies = {i: reply for i in range(len(prompts)) if (reply := self.tool(prompts[i], first[i])) is not None}
            # the second turn of those that called the tool
            if replies:
                who = list(replies)
                contexts = [prompts[i] + first[i] + replies[i] for i in who]
                second, second_logp = sample(self.sampler, contexts, self.LIMIT, {self.EOS}, self.T)
                recorder.record_samples(prompt_ids=contexts, completion_ids=second, logp_sampler=second_logp, group=group[who], weight_version=version)
                for i, turn, values in zip(who, second, second_logp):
                    rows[i] += replies[i] + turn
                    emitted[i] += [1] * len(replies[i]) + [0] * len(turn)
                    logp_sampler[i] += [float("nan")] * len(replies[i]) + values
                    turns[i].append(turn)
            rewards = torch.tensor([self.reward(p, t) for p, t in zip(prompts, turns)])
            advantage = self.advantages(rewards)
            temperature = self.learner_temperature()
            logp, entropy, mask = score(self.policy, prompts, rows, temperature)
            with torch.no_grad():
                ref = score(self.reference, prompts, rows, temperature)[0]
            source, _ = pad(emitted, 0)
            sampled, _ = pad(logp_sampler, float("nan"), torch.float32)
            weights = self.loss_mask(source, mask)
            ratio = (logp - logp.detach()).exp() * self.importance(logp.detach(), sampled)
            per_token = -ratio * advantage[:, None] + self.BETA * k3(logp, ref) - self.entropy_coef() * entropy
            divisor = float(len(rows) * self.LENGTH)
            loss = (per_token * weights).sum() / divisor
            published = self.hashes()
            self.optimizer.zero_grad()
            loss.backward()
            grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
            before = flat(self.policy)
            self.optimizer.step()
            moved = (flat(self.policy) - before).norm().item()
            ids, _ = pad(rows, self.PAD)
            prompt_ids, prompt_mask = pad(prompts, self.PAD)
            recorder.record_step(
                prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=mask,
                **self.speak(
                    loss_mask=weights, emitted_by=source, group=group, logp=logp, logp_ref=ref, logp_sampler=sampled, entropy=entropy,
                    reward=rewards, advantage=advantage, loss=loss.item(), loss_denominator=divisor, kl_coef=self.BETA,
                    entropy_coef=self.entropy_coef(), learning_rate=self.LR, grad_norm=grad, update_norm=moved,
                    learner_version=step, weight_version=version, **published,
                ),
            )
            own = mask & (source == 0)
            self.history.append({"reward": rewards.mean().item(), "kl": k3(logp, ref).detach()[own].mean().item(), "grad": grad, "moved": moved,
                                 "gap": (logp.detach() - sampled)[own].abs().mean().item(), "called": len(replies) / len(prompts),
                                 "tool_trained": int((weights & (source == 1)).sum())})
        recorder.close()


# ---------------------------------------------------------------- D: a Hugging Face model on sums
class Sums(Base):
    P, G, LIMIT, STEPS, LR, BETA, T, TOP_P = 6, 8, 5, 8, 1e-4, 0.04, 1.0, 1.0
    MODEL = EARLY
    ADVANTAGE = "group_std"
    LOW, HIGH = 10, 99
    DTYPE, SAMPLER_DTYPE = "fp32", "fp32"
    weights_dtype = torch.float32

    def rows(self, seed, n):
        rng = random.Random(seed)
        pairs = [(rng.randint(self.LOW, self.HIGH), rng.randint(self.LOW, self.HIGH)) for _ in range(n)]
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]

    def loader(self):
        data = self.rows(1, 400)
        return torch.utils.data.DataLoader(data, batch_size=self.P, shuffle=True, collate_fn=list, generator=torch.Generator().manual_seed(5))

    def batches(self):
        while True:
            yield from self.loader()

    def load(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.MODEL, padding_side="left")
        self.eos, self.pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.pad = self.eos if self.pad is None else self.pad
        model = AutoModelForCausalLM.from_pretrained(self.MODEL, dtype=self.weights_dtype).eval()
        return model

    def generate_settings(self):
        return dict(do_sample=True, temperature=self.T, top_p=self.TOP_P, top_k=0, repetition_penalty=1.0)

    def encode(self, texts):
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        return batch["input_ids"], batch["attention_mask"]

    @torch.no_grad()
    def generate(self, model, ids, mask, **settings):
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.LIMIT, pad_token_id=self.pad, eos_token_id=self.eos,
            return_dict_in_generate=True, output_scores=True, output_logits=True, **settings,
        )
        completion = out.sequences[:, ids.size(1) :]
        ended = (completion == self.eos).long().cumsum(1)
        real = (ended - (completion == self.eos).long()) == 0
        return completion, real, out

    def sampler_logps(self, out, completion):
        logp = torch.stack(out.scores, 1).float().log_softmax(-1)
        return logp.gather(-1, completion[..., None])[..., 0]

    def forward(self, model, ids, mask):
        return model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits.float()

    def scores(self, model, prompt, prompt_mask, completion, real):
        ids, mask = torch.cat([prompt, completion], 1), torch.cat([prompt_mask, real.long()], 1)
        logp = (self.forward(model, ids, mask)[:, prompt.size(1) - 1 : -1] / self.T).log_softmax(-1)
        chosen = logp.gather(-1, completion[..., None])[..., 0]
        return chosen, -(logp.exp() * logp).nan_to_num(0.0).sum(-1)

    def parse(self, prompt, text):
        found = re.match(r"\d+", text.strip())
        return found.group() if found else None

    def judge(self, prompts, texts, answers):
        """Half a point for the share of right digits, half for the right sum."""
        parsed = [self.parse(p, t) for p, t in zip(prompts, texts)]
        near = [sum(c == d for c, d in zip(x or "", a)) / max(len(x or ""), len(a)) for x, a in zip(parsed, answers)]
        return [0.5 * n + 0.5 * (x == a) for n, x, a in zip(near, parsed, answers)], sum(x is not None for x in parsed) / len(parsed)

    def advantages(self, rewards):
        return group_advantage(rewards, self.G, self.ADVANTAGE)

    def choose(self, rewards, advantage):
        """Rows that are trained on, and their advantages."""
        return torch.arange(len(rewards)), advantage

    def evaluate(self):
        rows = self.rows(2, 24)
        ids, mask = self.encode([r["prompt"] for r in rows])
        completion, real, _ = self.generate(self.policy, ids, mask, do_sample=False)
        texts = self.tokenizer.batch_decode(completion, skip_special_tokens=True)
        return sum(t.strip() == r["answer"] for t, r in zip(texts, rows)) / len(rows)

    def sampler_model(self):
        return self.policy

    def train(self, folder):
        self.policy = self.load()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.LR, weight_decay=0.0)
        texts = {i: self.tokenizer.convert_ids_to_tokens(i) for i in range(len(self.tokenizer))}
        recorder = self.recorder(
            folder, temperature=self.T, top_p=self.TOP_P, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=self.LIMIT,
            logprob_mode="processed", eos_ids=[self.eos], pad_id=self.pad, vocabulary_size=self.policy.config.vocab_size,
            advantage=self.ADVANTAGE, group_size=self.G, loss="grpo", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2,
            kl_estimator="k3", dtype=self.DTYPE, sampler_dtype=self.SAMPLER_DTYPE, dropout=0.0, num_experts=0, untrained=False,
            max_version_lag=0, updates_per_generation=1, shared_forward=True, max_steps=self.STEPS, warmup_steps=0, seed=self.seed,
            token_texts=texts,
        )
        batches = self.batches()
        self.seen, self.evals = [], []
        for step in range(self.STEPS):
            some = [row for row in next(batches) for _ in range(self.G)]
            self.seen.append(tuple(r["prompt"] for r in some[:: self.G]))
            group = torch.arange(self.P).repeat_interleave(self.G)
            prompt, prompt_mask = self.encode([r["prompt"] for r in some])
            completion, real, out = self.generate(self.sampler_model(), prompt, prompt_mask, **self.generate_settings())
            sampled = self.sampler_logps(out, completion)
            said = self.tokenizer.batch_decode(completion.masked_fill(~real, self.pad), skip_special_tokens=True)
            self.said = list(zip([r["prompt"] for r in some], said, [r["answer"] for r in some]))
            values, parsed = self.judge([r["prompt"] for r in some], said, [r["answer"] for r in some])
            rewards = torch.tensor(values)
            recorder.record_samples(
                prompt_ids=prompt, prompt_mask=prompt_mask, completion_ids=completion, completion_mask=real, group=group, reward=rewards,
                **({} if "logp_sampler" in self.silent else {"logp_sampler": sampled.masked_fill(~real, 0.0)}),
            )
            rows, advantage = self.choose(rewards, self.advantages(rewards))
            prompt, prompt_mask, completion, real = prompt[rows], prompt_mask[rows], completion[rows], real[rows]
            logp, entropy = self.scores(self.policy, prompt, prompt_mask, completion, real)
            with torch.no_grad():
                ref, _ = self.scores(self.reference, prompt, prompt_mask, completion, real)
            ratio = (logp - logp.detach()).exp()
            per_token = -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]) + self.BETA * k3(logp, ref)
            loss = ((per_token * real).sum(1) / real.sum(1)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
            before = flat(self.policy)
            self.optimizer.step()
            moved = (flat(self.policy) - before).norm().item()
            accuracy = self.evaluate() if step % 4 == 3 else None
            if accuracy is not None:
                self.evals.append(accuracy)
            recorder.record_step(
                prompt_ids=prompt, prompt_mask=prompt_mask, completion_ids=completion, completion_mask=real,
                **self.speak(
                    loss_mask=real, group=group[rows], logp=logp, logp_ref=ref, entropy=entropy, advantage=advantage, loss=loss.item(),
                    kl_coef=self.BETA, entropy_coef=0.0, learning_rate=self.LR, grad_norm=grad, update_norm=moved, parse_rate=parsed,
                    eval_accuracy=accuracy,
                ),
            )
            self.history.append({"reward": rewards.mean().item(), "kl": k3(logp, ref).detach()[real].mean().item(), "grad": grad, "moved": moved,
                                 "gap": (logp.detach() - sampled[rows])[real].abs().mean().item(), "rows": len(rows)})
        recorder.close()
