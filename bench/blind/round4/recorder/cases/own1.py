"""Two loops of their own: a fleet (bf16 sampler, mini-batches of micro-batches) and packed rows (leave-one-out, KL in the reward)."""
from ground import *
from torch.nn import functional as F


class Compact(nn.Module):
    """A causal transformer that can score several documents in one row."""

    def __init__(self, vocabulary, width=48, layers=2, heads=4, length=48, dropout=0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attend = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head, self.heads, self.drop = nn.Linear(width, vocabulary), heads, nn.Dropout(dropout)

    def forward(self, ids, places=None, documents=None):
        rows, n = ids.shape
        if places is None:
            places = torch.arange(n).expand(rows, n)
        see = torch.ones(n, n, dtype=torch.bool).tril().expand(rows, 1, n, n)
        if documents is not None:
            see = see & (documents[:, None, :, None] == documents[:, None, None, :])
        x = self.embed(ids) + self.place(places)
        for i in range(len(self.attend)):
            q, k, v = self.attend[i](self.norms[2 * i](x)).view(rows, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
            x = x + self.drop(self.mix[i](seen.transpose(1, 2).reshape(rows, n, -1)))
            x = x + self.drop(self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x)))))
        return self.head(self.norms[-1](x)).float()


class FleetNet(Compact):
    pass


class PackedNet(Compact):
    pass


# ---------------------------------------------------------------- E: reverse digits; a sampler in bf16, several updates, micro-batches
class Fleet(Base):
    P, G, LIMIT, GENERATIONS = 6, 6, 6, 5
    MINI, MICRO = 2, 3
    LR, WARMUP, BETA, T = 1e-3, 3, 0.02, 0.9
    LOW, HIGH, LAG = 0.2, 0.28, 0
    EOS, PAD, SEP, V = 10, 11, 12, 13
    WARM = 26
    ADVANTAGE = "group_std"
    SAMPLER_DTYPE = torch.bfloat16

    def task(self):
        digits = [random.randrange(10) for _ in range(random.randint(2, 4))]
        return digits + [self.SEP], digits[::-1] + [self.EOS]

    def policy_model(self):
        return self.warmed(FleetNet(self.V), self.task, self.WARM)

    def prompts(self, generation):
        return [self.task()[0] for _ in range(self.P)]

    def reward(self, prompt, completion):
        want = prompt[:-1][::-1] + [self.EOS]
        return sum(a == b for a, b in zip(completion, want)) / max(len(want), len(completion))

    def advantages(self, rewards):
        return group_advantage(rewards, self.G, self.ADVANTAGE)

    def make_optimizer(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=self.LR, weight_decay=0.0)

    def learning_rate(self, update):
        return self.LR * min(1.0, (update + 1) / self.WARMUP) if self.WARMUP else self.LR

    def make_sampler(self):
        return copy.deepcopy(self.policy).requires_grad_(False).to(self.SAMPLER_DTYPE)

    def publish(self, generation):
        """The learner's weights in the sampler's dtype; returns the number of their updates."""
        with torch.no_grad():
            for mine, theirs in zip(self.sampler.parameters(), self.policy.parameters()):
                mine.copy_(theirs)
        return self.updates

    def published(self):
        return {"weights_published": fingerprint(copy.deepcopy(self.policy).to(self.SAMPLER_DTYPE)), "weights_loaded": fingerprint(self.sampler)}

    def refresh(self, generation):
        """The reference stays the start."""

    def trained(self, completions, mask):
        return mask.clone()

    def weigh(self, old, sampled, mask):
        """Weights of the tokens against a sampler that differs."""
        return torch.ones_like(old)

    def before_generation(self, generation):
        """Such as a resume."""

    def backward(self, rows, tokens):
        """Gradient of the mini-batch in micro-batches; what they scored."""
        value, logps, entropies = 0.0, [None] * len(rows), [None] * len(rows)
        width = -(-len(rows) // self.MICRO)
        self.optimizer.zero_grad()
        for at in range(0, len(rows), width):
            some = rows[at : at + width]
            loss, logp, entropy = self.loss(some, tokens)
            loss.backward()
            value += loss.item()
            logps[at : at + width], entropies[at : at + width] = list(logp.detach()), list(entropy.detach())
        return value, logps, entropies

    def loss(self, rows, tokens):
        batch = self.batch
        logp, entropy, here = score(self.policy, [batch["prompts"][i] for i in rows], [batch["completions"][i] for i in rows], self.T)
        n = here.size(1)
        ratio = (logp - batch["old"][rows, :n]).exp()
        advantage = batch["advantage"][rows][:, None]
        term = -torch.min(ratio * advantage, ratio.clamp(1 - self.LOW, 1 + self.HIGH) * advantage) * batch["weigh"][rows, :n]
        per_token = term + self.BETA * k3(logp, batch["ref"][rows, :n])
        return (per_token * batch["trained"][rows, :n]).sum() / tokens, logp, entropy

    def train(self, folder):
        self.policy = self.policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = self.make_optimizer()
        self.sampler, self.updates, self.gaps = self.make_sampler(), 0, []
        texts = {**{i: str(i) for i in range(10)}, self.PAD: "<pad>", self.EOS: "<eos>", self.SEP: "="}
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        recorder = self.recorder(
            folder, temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=self.LIMIT,
            logprob_mode="processed", eos_ids=[self.EOS], pad_id=self.PAD, vocabulary_size=self.V, advantage=self.ADVANTAGE,
            group_size=self.G, loss="dapo", aggregation="token_mean", clip_low=self.LOW, clip_high=self.HIGH, kl_estimator="k3",
            dtype=dtype[self.policy.head.weight.dtype], sampler_dtype=dtype[self.SAMPLER_DTYPE], dropout=0.0, num_experts=0, untrained=False,
            max_version_lag=self.LAG, updates_per_generation=self.MINI, shared_forward=False, max_steps=self.GENERATIONS * self.MINI,
            warmup_steps=self.WARMUP, seed=self.seed, token_texts=texts,
        )
        for generation in range(self.GENERATIONS):
            self.before_generation(generation)
            self.refresh(generation)
            version = self.publish(generation)
            prompts = [p for p in self.prompts(generation) for _ in range(self.G)]
            group = torch.arange(self.P).repeat_interleave(self.G)
            completions, reported = sample(self.sampler, prompts, self.LIMIT, {self.EOS}, self.T)
            rewards = torch.tensor([self.reward(p, c) for p, c in zip(prompts, completions)], dtype=torch.float32)
            recorder.record_samples(prompt_ids=prompts, completion_ids=completions, logp_sampler=reported, group=group, reward=rewards, weight_version=version)
            with torch.no_grad():
                old, _, mask = score(self.policy, prompts, completions, self.T)
                ref = score(self.reference, prompts, completions, self.T)[0]
            sampled, _ = pad(reported, 0.0, torch.float32)
            self.gaps.append((old - sampled)[mask].abs().mean().item())
            trained = self.trained(completions, mask)
            self.batch = dict(prompts=prompts, completions=completions, old=old, ref=ref, advantage=self.advantages(rewards), trained=trained,
                              weigh=self.weigh(old, sampled, mask))
            order = torch.randperm(len(prompts)).tolist()
            size = len(order) // self.MINI
            for at in range(0, len(order), size):
                rows = order[at : at + size]
                tokens = trained[rows].sum().clamp(min=1).item()
                for part in self.optimizer.param_groups:
                    part["lr"] = self.learning_rate(self.updates)
                value, logps, entropies = self.backward(rows, tokens)
                grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
                rate, before, hashes = self.optimizer.param_groups[0]["lr"], flat(self.policy), self.published() if at == 0 else {}
                self.optimizer.step()
                moved = (flat(self.policy) - before).norm().item()
                logp, _ = pad([v.tolist()[: len(completions[i])] for v, i in zip(logps, rows)], 0.0, torch.float32)
                entropy, _ = pad([v.tolist()[: len(completions[i])] for v, i in zip(entropies, rows)], 0.0, torch.float32)
                n = logp.size(1)
                ids, here = pad([completions[i] for i in rows], self.PAD)
                prompt_ids, prompt_mask = pad([prompts[i] for i in rows], self.PAD)
                recorder.record_step(
                    prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=here,
                    **self.speak(
                        loss_mask=trained[rows, :n], group=group[rows], logp=logp, logp_old=old[rows, :n], logp_ref=ref[rows, :n], entropy=entropy,
                        advantage=self.batch["advantage"][rows], loss=value, loss_denominator=float(tokens), kl_coef=self.BETA,
                        entropy_coef=0.0, learning_rate=rate, grad_norm=grad, update_norm=moved, learner_version=self.updates, **hashes,
                    ),
                )
                self.updates += 1
                self.history.append({"reward": rewards[rows].mean().item(), "kl": k3(logp, ref[rows, :n])[here].mean().item(), "grad": grad, "moved": moved})
        recorder.close()


# ---------------------------------------------------------------- F: next digits; packed rows, leave-one-out, the KL in the reward
class Packed(Base):
    P, G, LIMIT, STEPS, LR, BETA, T = 8, 6, 8, 10, 1e-3, 0.02, 1.0
    ROOM, LENGTH = 40, 8  # tokens of a packed row; constant divisor
    EOS, PAD, SEP, V = 10, 11, 12, 13
    WARM = 38
    ADVANTAGE = "leave_one_out"

    def task(self):
        digits = [random.randrange(10) for _ in range(random.randint(2, 6))]
        return digits + [self.SEP], [(d + 1) % 10 for d in digits] + [self.EOS]

    def policy_model(self):
        return self.warmed(PackedNet(self.V), self.task, self.WARM)

    def sizes(self):
        """Completions of each prompt."""
        return [self.G] * self.P

    def reward(self, prompt, completion):
        want = [(d + 1) % 10 for d in prompt[:-1]] + [self.EOS]
        return sum(a == b for a, b in zip(completion, want)) / max(len(want), len(completion))

    def shaped(self, rewards, logp, ref, mask):
        """The reward less the penalty for leaving the reference."""
        penalty = ((logp - ref) * mask).sum(1)
        return rewards - self.BETA * penalty, penalty

    def advantages(self, rewards, group):
        out = torch.zeros_like(rewards)
        for g in group.unique():
            own = rewards[group == g]
            out[group == g] = (own - own.mean()) * len(own) / max(1, len(own) - 1)
        return out

    def pack(self, lengths):
        """Bins of row numbers: first fit, longest first."""
        bins, left = [], []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            for b in range(len(bins)):
                if left[b] >= lengths[i]:
                    break
            else:
                bins.append([])
                left.append(self.ROOM)
                b = len(bins) - 1
            bins[b].append(i)
            left[b] -= lengths[i]
        return bins

    def forward(self, model, ids, places, documents):
        return model(ids, places, documents)

    def packed_scores(self, model, prompts, completions):
        rows = [p + c for p, c in zip(prompts, completions)]
        bins = self.pack([len(r) for r in rows])
        ids = torch.full((len(bins), self.ROOM), self.PAD)
        places, documents = torch.zeros_like(ids), torch.full_like(ids, -1)
        where = {}
        for b, members in enumerate(bins):
            at = 0
            for k, i in enumerate(members):
                span = slice(at, at + len(rows[i]))
                ids[b, span], places[b, span], documents[b, span] = torch.tensor(rows[i]), torch.arange(len(rows[i])), k
                where[i], at = (b, at), at + len(rows[i])
        logp = (self.forward(model, ids, places, documents) / self.T).log_softmax(-1)
        targets, mask = pad(completions, 0)
        row = torch.tensor([where[i][0] for i in range(len(rows))])[:, None]
        first = torch.tensor([where[i][1] + len(prompts[i]) - 1 for i in range(len(rows))])[:, None]
        at = (first + torch.arange(targets.size(1))).clamp(max=self.ROOM - 1)
        rows = logp[row, at]
        return rows.gather(-1, targets[..., None])[..., 0], -(rows.exp() * rows).sum(-1), mask

    def trained(self, completions, mask):
        return mask.clone()

    def arranged(self, advantage, prompts, completions):
        return advantage

    def loss(self, logp, advantage, weights, divisor):
        return -(logp * advantage[:, None] * weights).sum() / divisor

    def learning_rate(self, step):
        return self.LR

    def train(self, folder):
        self.policy = self.policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.LR)
        texts = {**{i: str(i) for i in range(10)}, self.PAD: "<pad>", self.EOS: "<eos>", self.SEP: ">"}
        recorder = self.recorder(
            folder, **{**dict(
                temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=self.LIMIT, logprob_mode="processed",
                eos_ids=[self.EOS], pad_id=self.PAD, vocabulary_size=self.V, advantage=self.ADVANTAGE, group_size=self.G, aggregation="constant",
                kl_estimator="k1_reward", dtype="fp32", dropout=0.0, num_experts=0, untrained=False, max_version_lag=0, updates_per_generation=1,
                shared_forward=True, max_steps=self.STEPS, warmup_steps=0, seed=self.seed, token_texts=texts,
            ), **self.say},
        )
        self.facts = []
        for step in range(self.STEPS):
            sizes = self.sizes()
            prompts = [p for p, n in zip([self.task()[0] for _ in sizes], sizes) for _ in range(n)]
            group = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)])
            completions, reported = sample(self.policy, prompts, self.LIMIT, {self.EOS}, self.T)
            earned = torch.tensor([self.reward(p, c) for p, c in zip(prompts, completions)], dtype=torch.float32)
            logp, entropy, mask = self.packed_scores(self.policy, prompts, completions)
            with torch.no_grad():
                ref = self.packed_scores(self.reference, prompts, completions)[0]
            rewards, penalty = self.shaped(earned, logp.detach(), ref, mask)
            recorder.record_samples(prompt_ids=prompts, completion_ids=completions, logp_sampler=reported, group=group, reward=rewards)
            advantage = self.arranged(self.advantages(rewards, group), prompts, completions)
            weights = self.trained(completions, mask)
            divisor = float(len(prompts) * self.LENGTH)
            loss = self.loss(logp, advantage, weights, divisor)
            for part in self.optimizer.param_groups:
                part["lr"] = self.learning_rate(step)
            self.optimizer.zero_grad()
            loss.backward()
            grad = nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0).item()
            before = flat(self.policy)
            self.optimizer.step()
            moved = (flat(self.policy) - before).norm().item()
            ids, _ = pad(completions, self.PAD)
            prompt_ids, prompt_mask = pad(prompts, self.PAD)
            recorder.record_step(
                prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=mask,
                **self.speak(
                    loss_mask=weights, logp=logp, logp_ref=ref, entropy=entropy, advantage=advantage, loss=loss.item(), loss_denominator=divisor,
                    reward_parts={"task": earned, "kl_penalty": -penalty}, kl_coef=self.BETA, entropy_coef=0.0,
                    learning_rate=self.learning_rate(step), grad_norm=grad, update_norm=moved,
                ),
            )
            sampled, _ = pad(reported, 0.0, torch.float32)
            self.history.append({"reward": earned.mean().item(), "kl": k3(logp, ref).detach()[mask].mean().item(), "grad": grad, "moved": moved,
                                 "gap": (logp.detach() - sampled)[mask].abs().mean().item(), "gap_max": (logp.detach() - sampled)[mask].abs().max().item(),
                                 "length": mask.sum(1).float().mean().item(), "stopped": sum(c[-1] == self.EOS for c in completions) / len(completions)})
        recorder.close()
