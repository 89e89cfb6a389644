"""The on-disk evidence of a run: an open format that any trainer may write and the doctor reads.

    record.py       StepRecord: the tokens, rows and facts of one step
    rollout.py      sampled completions, and their conversion to a record
    columns.py      converts a record to an Arrow table and back
    store.py        records on disk: one folder per step, valid once its manifest exists
    part_limits.py  memory limits on Parquet files, checked before decoding
    thrift.py       reads the Thrift structs of Parquet footers and page headers
    run_facts.py    file names of a run; run.json and tokens.json
    schema.py       refuses runs that a newer klinic wrote
    metrics.py      computes the metrics of a step from its record
    files.py        bounded reads, JSON, and append-only journals
    tail.py         follows a growing journal
    writing.py      atomic and durable writes that never follow symbolic links
    facts.py        lossless JSON for floats, including NaN and infinity
    numbers.py      parses numbers and steps of journal entries
    verdict.py      verdicts of a check: pass, warn, fail, no data
    fields.py       names and meanings of facts, run keys, metrics and probes
    readers/        logs and exports of other trainers, one file per format

Nothing here imports torch.
"""
