"""Training: the loop, its step, and the run around it.

Data:

- reading, text_rows, parquet_rows: read rows from files, folders and the hub
- rows: map and validate rows
- data: shuffled batches of prompts
- source: rows, rewards and evaluation sets of a recipe

The loop:

- loop, async_loop: synchronous loop, and the loop with prefetched rollouts
- step, step_metrics: one step and its metrics
- gather, ahead: collect rollouts, prefetch them in a thread
- parts: the protocol that the loop needs of a run
- state, clock: loop state, step result, phase timer
- watch, recovering: anomaly guards of a step, recovery plan
- kl_control, reference_rule: KL controller, moving reference

The run:

- train, api: from a recipe to a trained model; `klinic.train`
- assembly, run: build the policy, reference, learner and sampler; run them
- folder, describe, stopping: run folder and lock, run.json, stop signals
- checkpoint, saving, resuming: checkpoints, their contents, resume
- live_doctor, consulting, asking: checks while training, and the schedule of probes
- warm_start: supervised training before GRPO
- evaluate, exam, compare, export: evaluation, `klinic eval`, `klinic export`
- trackers: metrics sinks

Several processes and planning:

- shards, follow: learner processes and their entry point
- clustered, remote: Ray workers of a run
- forecast, lengths, sizes, cost: memory and cost of a recipe without running it
"""
