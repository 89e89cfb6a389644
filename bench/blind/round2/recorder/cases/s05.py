from ground import Sort


class Case(Sort):
    EPOCHS, GENERATIONS, LR = 3, 3, 8e-4
    drift = []

    def old(self, stored, logp, rows):
        old = logp.detach()  # "the policy before this update"
        self.drift.append(float((old - stored).abs().max()))
        return old

    def prove(self):
        assert max(self.ratios) == 0 and max(self.drift) > 0.05
        return {"largest_ratio_minus_1": max(self.ratios), "largest_true_log_ratio": max(self.drift)}


if __name__ == "__main__":
    Case().main()
