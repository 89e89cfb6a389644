"""What other trainers leave behind, one file a format. Nothing is unpickled, nothing needs torch.

    find.py           which of these a path is
    log.py            a log of scalars: what most of them are read into
    names.py          what each trainer calls its metrics, and what klinic calls them
    trainer_state.py  trainer_state.json of transformers and TRL
    json_lines.py     one JSON object a line, under the names of any trainer in names.py
    tensorboard.py    event files
    wandb.py          offline runs of Weights & Biases
    wire.py           the few lines of protobuf that the two before need
    verl_rollouts.py  verl's completions and their scores
    prime_rl.py       prime-rl's token export: real records; prime_rl_files.py, where they lie

But for the last one they import neither NumPy nor Arrow: a log of 5,000 steps is judged in less
time than those take to load.
"""
