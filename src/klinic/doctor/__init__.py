"""Diagnoses a run from its evidence and decides on recovery from anomalies.

    hypothesis.py      a cause, and the findings of its check over the steps of a run
    weighing.py        the probability of each cause, given the checks that failed
    advice/            the steps that fix a cause, in the settings of the trainer of the run
    diagnosis.py       turns the findings of all steps into causes and a verdict
    dump_diagnosis.py  diagnoses the batch dump of another trainer, joined with its scalars
    dump_conversion.py writes such a dump, or a scalar log, as a run folder
    run_diagnosis.py   diagnoses a run on disk, with cached findings and worker processes
    segments.py        segments of a run: the unit of judging and caching
    judge_workers.py   worker processes that judge segments
    findings_cache.py  bounded cache of findings in the user's cache folder
    record_index.py    digests of records, by stat data where files are unchanged
    process_cases.py   judges the rows of each process alone
    cases.py           builds the cases that checks judge from a run on disk or in training
    anomalies.py       anomalies of a step, and the history that limits compare with
    recovery.py        decides on retry, skip, rollback or stop after an anomaly
    warning_signs.py   warning signs: drift too fast, not learning, retention dropping
    live.py            runs the checks on a finished step while the next one trains
    recorder.py        `klinic.Recorder`: records and diagnoses the steps of any loop
    recorder_settings.py  settings of `klinic.Recorder`, and run.json from them
    recorder_values.py  checks of the codes, names and versions that a loop passes to it
    foreign_run_log.py run folder, live doctor and console of a run that klinic does not train
    scalars/           checks of scalar logs

Nothing here imports torch.
"""
