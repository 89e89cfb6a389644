"""Training: the loop, its step, and the run around it.

The loop:

- loop: synchronous loop, and the loop with prefetched rollouts
- step, step_metrics: one step and its metrics
- collect, prefetch: collect rollouts, prefetch them in a thread
- protocol: the interface that the loop needs of a run
- state: loop state, step result, phase timer
- guards, recovery: anomaly guards of a step, recovery plan
- kl_control, reference_updates: KL controller, moving reference
- probes: schedule of the active probes, and the two that need no learner

The run:

- train, result: from a recipe to a trained model, and the result
- api, train_call, python_arguments: `klinic.train` and its arguments
- given_model, callbacks: a model passed as an object; `TrainerCallback` objects
- build, build_engine, parts: build the policy, reference, learner, sampler and its vLLM engine;
  the parts of a run
- run, run_log, run_checkpoints: the run, its journals and trackers, its saved state
- run_folder, run_facts, signals: run folder and lock, run.json, stop signals
- record_budget: drops old records
- published_run: a run whose output.dir is a URL
- checkpoint, resume: checkpoint files, resume
- source: rows, rewards and evaluation sets of a recipe
- warm_start: supervised training before GRPO
- evaluation, eval_suite, compare, export: evaluation, `klinic eval`, `klinic export`

Several processes:

- learner_processes, learner_process: learner processes and their entry point
- sharded_sampler: completions by all learner processes
- ray_run, ray_workers: Ray workers of a run
"""
