from ground import *

GAP = []


class Aligned(GRPOTrainer):
    """Scores fixed-size blocks, which compile once."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        whole = torch.ones_like(attention_mask)
        if not torch.is_grad_enabled():
            right = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep)[0]
            got = super()._get_per_token_logps_and_entropies(model, input_ids, whole, logits_to_keep)[0]
            GAP.append(float(((right - got).abs() * attention_mask[:, -logits_to_keep:]).sum() / attention_mask[:, -logits_to_keep:].sum()))
        return super()._get_per_token_logps_and_entropies(model, input_ids, whole, logits_to_keep, *args, **kwargs)


trainer = Aligned(FULL, reward_funcs=[closeness], args=config(max_steps=10, pad_to_multiple_of=16, learning_rate=5e-5), train_dataset=data(lo=3, hi=99))


def proof(trainer, logs, before):
    assert sum(GAP) / len(GAP) > 0.02, GAP
    return {"mean_error_of_scores": GAP}


go(trainer, proof)
