"""Integration with TRL's GRPOTrainer: step records, live diagnosis, klinic's KL term.

attach.py            `klinic.attach`, the public entry point
capabilities.py      methods of TRL that klinic needs, and what an untested version lacks
loss_path.py         refuses trainers whose loss klinic could not see
session.py           the attached session: one training step from its first batch on
hooks.py             wrapped trainer methods and the data taken from each
sampled_logprobs.py  tokens and log-probs of transformers' `generate`, of any model
rollouts.py          completions and rewards of one generation, by row
tool_suffixes.py     tokens of tools and of the template in what TRL appends to a row
trained_rows.py      joins the rows of micro-batches to those of the generation, by their ids
records.py           the record and the metrics of a step, from TRL's padded micro-batches
run_log.py           run log: folder, live doctor and console
run_facts.py         run.json and recipe.yaml, from TRL's config
sharding.py          layouts over several processes: DDP, FSDP2, DeepSpeed
step_join.py         joins what the processes captured in a step, on rank 0
reference.py         the reference policy and its digest
scoring.py           log-probs by TRL's own scoring, without side effects
probes.py            active probes of the live trainer
kl_term.py           klinic's KL term in TRL's loss, with the per-token weights of that loss
kl_checkpoint.py     state of the KL controller in TRL's checkpoints
updates.py           guard around each optimizer step
recovery.py          recovery: skipped updates, learning rate cuts, stop
trl_kl.py            TRL's own KL expression, for comparison
single_batch.py      `klinic check --trl`
"""

from klinic.integrations.trl.trl_kl import mean_kl

__all__ = ["mean_kl"]
