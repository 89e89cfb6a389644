from ground import Tool, fingerprint


class Case(Tool):
    LR = 2e-3
    prints = []

    def publish(self, step):
        # names as the wrapped (DDP) model has them
        state = {"module." + name: value for name, value in self.policy.state_dict().items()}
        self.sampler.load_state_dict(state, strict=False)
        self.prints.append(fingerprint(self.sampler))
        return step

    def hashes(self):
        return {}

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert len(set(self.prints)) == 1 and gaps[-1] > 0.02
        return {"hash_of_sampler": self.prints[-1], "gaps": gaps}


if __name__ == "__main__":
    Case().main()
