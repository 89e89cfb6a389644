from ground import Sums


class Case(Sums):
    def load(self):
        model = super().load()
        model.generation_config.repetition_penalty = 1.15  # as the checkpoint's generation_config.json has it
        return model

    def generate_settings(self):
        return dict(do_sample=True, temperature=self.T, top_p=self.TOP_P, top_k=0)

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert gaps[0] > 0.02
        return {"gap": gaps}


if __name__ == "__main__":
    Case().main()
