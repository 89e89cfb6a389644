"""The on-disk evidence of a run: an open format that any trainer may write and the doctor reads.

    record.py       StepRecord: the tokens, rows and facts of one step
    rollout.py      sampled completions, and their conversion to a record
    row_join.py     joins trained rows to sampled rows by their token ids
    batch_arrays.py converts padded or ragged batches of any loop to flat arrays
    sample_pool.py  the samples of a generation, and their join to trained rows
    sample_history.py  the last generations of samples: a loop may sample ahead
    processes.py    joins the rows of several training processes to one record
    columns.py      converts a record to an Arrow table and back
    store.py        records on disk: one folder per step, valid once its manifest exists
    part_merging.py merges the parts of many processes to a few files
    dropped_records.py  steps whose records a run dropped to stay within its budget
    part_limits.py  memory limits on Parquet files, checked before decoding
    thrift.py       reads the Thrift structs of Parquet footers and page headers
    run_facts.py    file names of a run; run.json and tokens.json
    schema_version.py  schema version of records and run.json
    schema.py       refuses runs that a newer klinic wrote
    bundle.py       bundles: a run in one file without its texts, names and paths
    bundle_head.py  what a bundle begins with
    redaction.py    what a bundle may hold: allow-lists of keys, facts, metrics, columns and words
    renumbering.py  replaces the token ids of records by numbers that stand for no text
    stored_zip.py   uncompressed zip files, and a strict reader of them
    metrics.py      computes the metrics of a step from its record
    measures.py     what the metrics measure over the tokens of a step
    metric_meanings.py  unit and meaning of every metric
    token_tally.py  means, extremes and tails of a quantity per token
    trained_tokens.py  the trained tokens, in blocks of rows
    end_texts.py    token ids whose texts say that a completion ends
    step_sample.py  the sample of a step that the live doctor of several processes sees
    merging.py      sums and order statistics of numbers that several processes hold
    files.py        bounded reads, JSON, and append-only journals
    tail.py         follows a growing journal
    writing.py      atomic and durable writes that never follow symbolic links
    facts.py        lossless JSON for floats, including NaN and infinity
    final_answers.py  marked final answers of texts
    numbers.py      parses numbers and steps of journal entries
    warm_start_status.py  progress of a warm start
    verdict.py      verdicts of a check: pass, warn, fail, no data
    fields.py       names and meanings of facts, run keys, metrics and probes
    remote/         runs at a URL: published, fetched, valid by their manifest
    readers/        logs and exports of other trainers, one file per format

Nothing here imports torch.
"""
