"""Diagnoses a run from its evidence and decides on recovery from anomalies.

    diagnosis.py       triage: turns the findings of all steps into one cause, or abstains
    run_diagnosis.py   diagnoses a run on disk, with cached findings and worker processes
    segments.py        segments of a run: the unit of judging and caching
    judge_workers.py   worker processes that judge segments
    findings_cache.py  bounded cache of findings in the user's cache folder
    record_index.py    digests of records, by stat data where files are unchanged
    cases.py           builds the cases that checks judge from a run on disk or in training
    anomalies.py       anomalies of a step, and the history that limits compare with
    recovery.py        decides on retry, skip, rollback or stop after an anomaly
    warning_signs.py   warning signs: drift too fast, not learning, retention dropping
    live.py            runs the checks on a finished step while the next one trains
    scalars/           checks of scalar logs

Nothing here imports torch.
"""
