import torch

from ground import Sums


class Case(Sums):
    T = 0.6
    say = {"logprob_mode": "raw"}

    def sampler_logps(self, out, completion):
        """As vLLM reports them by default: before the temperature."""
        logp = torch.stack(out.logits, 1).float().log_softmax(-1)
        return logp.gather(-1, completion[..., None])[..., 0]

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert gaps[0] > 0.05
        return {"gap_raw_to_tempered": gaps}


if __name__ == "__main__":
    Case().main()
