"""Readers for the batch dumps of other trainers: completions with rewards, tokens or log-probs.

    find.py             finds the dumps at a path, without importing NumPy
    token_dump.py       TokenDump: the steps of a dump as records, and what it lacks
    rows.py             one completion of a dump, and a record of many
    regraded.py         rewards against the answers of the dataset that a dump holds
    json_fields.py      checked fields of a JSON line
    advantage_kind.py   which advantage estimator fits the recorded advantages
    texts.py            completions without token ids: characters in their place
    nemo_rl.py          train_data_stepN.jsonl
    open_instruct.py    RUN_rollouts_NNNNNN.jsonl of --save_traces
    trl_completions.py  completions_NNNNN.parquet of log_completions
    ms_swift.py         completions.jsonl of --log_completions
    areal.py            VERSION/TASK.jsonl of dump_to_file
    verl_texts.py       STEP.jsonl of trainer.rollout_data_dir
    verifiers.py        traces.jsonl of verifiers and prime-rl
    prime_rl_tokens.py  token exports of prime-rl, joined with its traces
    torch_files.py      paths of dumps that torch wrote, which `klinic convert` reads

Every reader streams: one step is in memory at a time.
"""
