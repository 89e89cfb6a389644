"""Readers for logs and exports of other trainers, one file per format.

No reader unpickles data or needs torch.

    find.py           detects the format of a path
    run_folders.py    the run to read in a folder of several
    log.py            ScalarLog: the common form of most formats
    trainer.py        Trainer: a trainer's metric names
    own_names.py      usual metric names of loops of no known trainer
    given_names.py    metric names that the user gives
    names.py          metric names of each trainer, mapped to klinic's
    recognise.py      which trainer wrote a log
    trainer_state.py  trainer_state.json of transformers and TRL
    json_lines.py     one JSON object per line, with the metric names of any trainer in names.py
    json_document.py  a JSON list with one object per step, or a table by column
    table_csv.py      CSV of W&B, MLflow and others
    console_text.py   the text that a trainer prints
    trackio_db.py     the database of trackio
    mlflow_files.py   a run in MLflow's file store
    tensorboard.py    event files
    wandb.py          offline runs of Weights & Biases
    wire.py           minimal protobuf decoder for the two above
    verl_rollouts.py  completions and scores of verl
    dumps/            batch dumps of other trainers, read as records
    prime_rl.py       token export of prime-rl, read as records
    prime_rl_files.py paths of that export

All but prime_rl.py and the readers in dumps/ import neither NumPy nor Arrow: checking a log of
5,000 steps takes less time than importing them.
"""
