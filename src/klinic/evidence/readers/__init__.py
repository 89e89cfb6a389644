"""Readers for logs and exports of other trainers, one file per format.

No reader unpickles data or needs torch.

    find.py           detects the format of a path
    log.py            ScalarLog: the common form of most formats
    names.py          metric names of each trainer, mapped to klinic's
    trainer_state.py  trainer_state.json of transformers and TRL
    json_lines.py     one JSON object per line, with the metric names of any trainer in names.py
    tensorboard.py    event files
    wandb.py          offline runs of Weights & Biases
    wire.py           minimal protobuf decoder for the two above
    verl_rollouts.py  completions and scores of verl
    prime_rl.py       token export of prime-rl, read as records
    prime_rl_files.py paths of that export

All but prime_rl.py import neither NumPy nor Arrow: checking a log of 5,000 steps takes less time
than importing them.
"""
