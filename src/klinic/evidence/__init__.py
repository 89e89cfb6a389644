"""What a run leaves behind: an open format that anything may write and the doctor reads.

    record.py     the evidence of one step: flat tokens and rows
    rollout.py    completions as the sampler made them, and how they become a record
    columns.py    a record as a table of columns, and back
    store.py      records on disk: one folder a step, which counts once its manifest is there
    run_facts.py  run.json and tokens.json: what holds for the whole run
    metrics.py    the numbers of a step, from its record alone
    files.py      durable small files: written whole or not at all
    fields.py     facts, run keys, metrics and probes, by name
    causes.py     which fields tell which cause apart
    readers/      what other trainers leave behind, one file a format

Nothing here imports torch.
"""
