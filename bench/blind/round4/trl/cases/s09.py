from ground import *

CLIPS = []


class Light(GRPOTrainer):
    """Keeps the batch small: what the loss can compute itself is not kept over the iterations."""

    def _compute_loss(self, model, inputs):
        kept = inputs.get("old_per_token_logps")
        if kept is not None:
            with torch.no_grad():
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
                now = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))[0]
                off = (((now - kept).exp() - 1).abs() > 0.2).float() * inputs["completion_mask"]
                CLIPS.append(float(off.sum() / inputs["completion_mask"].sum()))
        return super()._compute_loss(model, {k: v for k, v in inputs.items() if k != "old_per_token_logps"})


trainer = Light(FULL, reward_funcs=[closeness], args=config(max_steps=15, num_iterations=5, learning_rate=1e-4, beta=0.01), train_dataset=data())


def proof(trainer, logs, before):
    assert max(CLIPS) > 0.03 and all(x["clip_ratio/region_mean"] == 0 for x in logs), CLIPS
    return {"share_of_tokens_beyond_the_clip": CLIPS, "reported_clip": [x["clip_ratio/region_mean"] for x in logs]}


go(trainer, proof)
