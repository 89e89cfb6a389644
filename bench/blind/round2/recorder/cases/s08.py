from ground import Tool


class Case(Tool):
    silent = ("emitted_by",)

    def loss_mask(self, emitted, mask):
        return mask

    def prove(self):
        trained = [h["tool_trained"] for h in self.history]
        assert min(trained) > 0
        return {"tool_tokens_trained": trained}


if __name__ == "__main__":
    Case().main()
