"""A replay buffer that orders the rows of a step by prompt and response.

verl's own keeps them in the order in which they ended, which differs between two runs of the same
configuration: sums over rows are then rounded differently.
"""

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class SortedRows(ReplayBuffer):
    def _materialize_batch(self, *args, **kwargs):
        batch = super()._materialize_batch(*args, **kwargs)
        fields = transfer_queue.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["extra_info", "responses"],
        )
        prompts = [facts["index"] for facts in list(fields["extra_info"])]
        responses = [row.tolist() for row in fields["responses"]]
        batch.reorder(sorted(range(len(prompts)), key=lambda row: (prompts[row], responses[row])))
        return batch
