from ground import Echo


class Case(Echo):
    PAD = Echo.EOS  # tokenizer.pad_token = tokenizer.eos_token
    LR = 2e-3
    lost = 0

    def loss_mask(self, ids, mask):
        weights = ids != self.PAD
        self.lost += int((mask & ~weights).sum())
        return weights

    def prove(self):
        assert self.lost > 100
        return {"ends_without_loss": self.lost, "stopped": [h["stopped"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
