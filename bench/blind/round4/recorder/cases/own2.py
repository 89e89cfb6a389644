"""A loop of several turns: guess a digit; the environment says higher or lower."""
from ground import *


class GameNet(Recurrent):
    pass


class Game(Base):
    P, G, STEPS, LR, BETA, T = 6, 8, 10, 1e-3, 0.01, 1.0
    TURNS, LIMIT = 4, 4  # of an episode; tokens of a turn
    EOS, PAD, ASK, NOTE, END, HIGHER, LOWER, USER, GO, V = 10, 11, 12, 13, 14, 15, 16, 17, 18, 19
    WARM = 220
    LENGTH = 24

    def task(self):
        """A secret digit and its prompt, which tells a range that holds it."""
        low = random.randrange(6)
        high = random.randrange(low + 3, 10)
        return random.randint(low, high), [self.ASK, low, high, self.GO]

    def lesson(self):
        secret, prompt = self.task()
        low, high, out = prompt[1], prompt[2], []
        for turn in range(self.TURNS):
            guess = (low + high) // 2 if random.random() < 0.6 else random.randint(low, high)
            if random.random() < 0.15:
                guess = random.randrange(10)
            out += [self.NOTE, guess, self.END]
            reply = self.answer(secret, [self.NOTE, guess, self.END])
            if reply is None:
                break
            if turn < self.TURNS - 1:
                out += self.render(reply)
            if reply == [self.HIGHER]:
                low = min(9, max(low, guess + 1))
            else:
                high = max(0, min(high, guess - 1))
            low, high = min(low, high), max(low, high)
        return prompt, out

    def policy_model(self):
        return self.warmed(GameNet(self.V), self.lesson, self.WARM)

    def guess(self, turn):
        return turn[1] if len(turn) == 3 and turn[0] == self.NOTE and turn[1] < 10 and turn[2] == self.END else None

    def answer(self, secret, turn):
        """What the environment says; None ends the episode."""
        guess = self.guess(turn)
        if guess is None or guess == secret:
            return None
        return [self.HIGHER] if secret > guess else [self.LOWER]

    def render(self, reply):
        return [self.USER] + reply + [self.GO]

    def source(self, reply):
        """Of each token behind a turn: 1 the environment, 2 the template."""
        return [2] + [1] * len(reply) + [2]

    def context(self, prompt, turns, replies):
        """What the sampler reads before the next turn."""
        out = list(prompt)
        for turn, reply in zip(turns, replies):
            out += turn + self.render(reply)
        return out

    def reward(self, secret, turns):
        found = self.guess(turns[-1]) == secret
        return (1.0 - 0.2 * (len(turns) - 1) if found else 0.0) - (0.2 if self.guess(turns[-1]) is None else 0.0)

    def baseline(self, rewards):
        by = rewards.view(self.P, self.G)
        return (by - by.mean(1, keepdim=True)).flatten()

    def advantages(self, rewards, source, mask, turn_of, episodes):
        """One per row, or per token."""
        return self.baseline(rewards)

    def loss_mask(self, source, mask):
        return mask & (source == 0)

    def learner_temperature(self):
        return self.T

    def training_row(self, prompt, turns, replies):
        """The tokens behind the prompt, their sources and their turns."""
        row, source, turn_of = [], [], []
        for k, turn in enumerate(turns):
            row, source, turn_of = row + turn, source + [0] * len(turn), turn_of + [k] * len(turn)
            if k < len(turns) - 1:
                tail = self.render(replies[k])
                row, source, turn_of = row + tail, source + self.source(replies[k]), turn_of + [k] * len(tail)
        return row, source, turn_of

    def train(self, folder):
        self.policy = self.policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.LR, betas=(0.9, 0.95), weight_decay=0.0)
        names = {self.PAD: "<pad>", self.EOS: "<eos>", self.ASK: "?", self.NOTE: "guess", self.END: "<end>", self.HIGHER: "higher",
                 self.LOWER: "lower", self.USER: "<user>", self.GO: "<assistant>"}
        recorder = self.recorder(
            folder, **{**dict(
                temperature=self.T, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, logprob_mode="processed", eos_ids=[self.END],
                pad_id=self.PAD, vocabulary_size=self.V, advantage="group_mean", group_size=self.G, aggregation="constant",
                max_new_tokens=self.LIMIT * self.TURNS, loss="dr_grpo", clip_low=0.2, clip_high=0.2, kl_estimator="k3", dtype="fp32", dropout=0.0,
                untrained=False, max_version_lag=0, updates_per_generation=1, shared_forward=True, max_steps=self.STEPS, warmup_steps=0,
                seed=self.seed, token_texts={**{i: str(i) for i in range(10)}, **names},
            ), **self.say},
        )
        for step in range(self.STEPS):
            some = [self.task() for _ in range(self.P)]
            secrets = [s for s, _ in some for _ in range(self.G)]
            prompts = [p for _, p in some for _ in range(self.G)]
            group = torch.arange(self.P).repeat_interleave(self.G)
            turns, replies, logps = [[] for _ in prompts], [[] for _ in prompts], [[] for _ in prompts]
            live = list(range(len(prompts)))
            for _ in range(self.TURNS):
                if not live:
                    break
                contexts = [self.context(prompts[i], turns[i], replies[i]) for i in live]
                said, values = sample(self.policy, contexts, self.LIMIT, {self.END}, self.T)
                recorder.record_samples(prompt_ids=contexts, completion_ids=said, logp_sampler=values, group=group[live])
                nxt = []
                for i, turn, logp in zip(live, said, values):
                    turns[i].append(turn)
                    logps[i].append(logp)
                    reply = self.answer(secrets[i], turn)
                    if reply is not None:
                        replies[i].append(reply)
                        nxt.append(i)
                live = nxt
            rewards = torch.tensor([self.reward(s, t) for s, t in zip(secrets, turns)], dtype=torch.float32)
            built = [self.training_row(p, t, r) for p, t, r in zip(prompts, turns, replies)]
            rows = [b[0] for b in built]
            source, mask = pad([b[1] for b in built], 0)
            turn_of, _ = pad([b[2] for b in built], -1)
            sampled = torch.full(mask.shape, float("nan"))
            for i, values in enumerate(logps):
                values, own = [v for turn in values for v in turn], (mask[i] & (source[i] == 0)).nonzero()[:, 0]
                if len(values) == len(own):
                    sampled[i, own] = torch.tensor(values)
            logp, entropy, _ = score(self.policy, prompts, rows, self.learner_temperature())
            with torch.no_grad():
                ref = score(self.reference, prompts, rows, self.learner_temperature())[0]
            advantage = self.advantages(rewards, source, mask, turn_of, list(zip(secrets, turns)))
            spread = advantage if advantage.dim() == 2 else advantage[:, None]
            weights = self.loss_mask(source, mask)
            per_token = -(logp - logp.detach()).exp() * spread + self.BETA * k3(logp, ref)
            divisor = float(len(rows) * self.LENGTH)
            loss = (per_token * weights).sum() / divisor
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
                    loss_mask=weights, emitted_by=source, group=group, logp=logp, logp_ref=ref, logp_sampler=sampled, entropy=entropy, reward=rewards,
                    advantage=advantage, loss=loss.item(), loss_denominator=divisor, kl_coef=self.BETA, entropy_coef=0.0,
                    learning_rate=self.LR, grad_norm=grad, update_norm=moved,
                ),
            )
            own = mask & (source == 0) & ~sampled.isnan()
            self.history.append({
                "reward": rewards.mean().item(), "kl": k3(logp, ref).detach()[own].mean().item(), "grad": grad, "moved": moved,
                "gap": (logp.detach() - sampled)[own].abs().mean().item(), "turns": sum(map(len, turns)) / len(turns),
                "alien": int((weights & (source != 0)).sum()), "missed": int((~weights & mask & (source == 0)).sum()),
                "gap_first": (logp.detach() - sampled)[own & (turn_of == 0)].abs().mean().item(),
                "gap_later": (logp.detach() - sampled)[own & (turn_of > 0)].abs().nan_to_num().mean().item() if (own & (turn_of > 0)).any() else 0.0,
            })
        recorder.close()
