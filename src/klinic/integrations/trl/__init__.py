"""Integration with TRL's GRPOTrainer: step records, live diagnosis, klinic's KL term.

attaching.py      `klinic.attach`, the public entry point
attached.py       the attached session: one training step from its first batch on
hooks.py          wrapped trainer methods and the data taken from each
wrapping.py       wraps and restores methods of an object
generation.py     sampler log-probs of transformers' `generate`
drawn.py          completions and rewards of one generation, by row
records.py        the record of a step, from TRL's padded micro-batches
step_metrics.py   metrics of a step, from its record
keeping.py        run log: folder, live doctor and console
describe.py       run.json and recipe.yaml, from TRL's config
reference.py      the reference policy and its digest
scoring.py        log-probs by TRL's own scoring, without side effects
questions.py      active probes of the live trainer
kl_term.py        klinic's KL term in TRL's loss
token_weights.py  per-token weights of TRL's losses
updates.py        guard around each optimizer step
recovering.py     recovery: skipped updates, learning rate cuts, stop
own_kl.py         TRL's own KL expression, for comparison
single_batch.py   `klinic check --trl`
versions.py       supported TRL versions
"""

from klinic.integrations.trl.own_kl import mean_kl

__all__ = ["mean_kl"]
