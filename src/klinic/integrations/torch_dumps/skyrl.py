"""Reads training batches of SkyRL (`trainer.dump_data_batch=true`) that were saved as tensors.

SkyRL writes pickles; `torch_files.SKYRL_COMMAND` writes their tensors to `.pt` files. `sequences`
and `attention_mask` cover prompt and response; `response_mask`, `loss_mask`, `rollout_logprobs`,
`action_log_probs` (the learner before the update), `base_action_log_probs` (the reference) and
`advantages` cover the last positions, as many as the longest response has. Rewards and groups are
not dumped: rows with the same prompt form a group.
Source: SkyRL a9564572e, skyrl/train/trainer.py:430-446, skyrl/train/dataset/preprocess.py:108.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from klinic.evidence.readers.dumps.rows import DumpRow, build_record, constant_advantage
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.dumps.torch_files import TorchDump, TorchStep
from klinic.evidence.record import StepRecord
from klinic.integrations.torch_dumps.loading import (
    Fields,
    is_plain,
    load_file,
    refuse_large_batch,
)

COLUMNS = {
    "logp_sampler": "rollout_logprobs",
    "logp_old": "action_log_probs",
    "logp_ref": "base_action_log_probs",
    "token_advantage": "advantages",
}


def open_dump(dump: TorchDump) -> TokenDump:
    """Return the dump of a folder."""
    return TokenDump(
        format="training batches of SkyRL",
        path=dump.folder,
        read_records=lambda: _read_records(dump.steps),
        facts={"trainer": "skyrl"},
        lacks="rewards, entropy, finish reasons, sources of tokens",
        num_files=len(dump.steps),
    )


def _read_records(steps: Sequence[TorchStep]) -> Iterator[StepRecord]:
    for files in steps:
        rows = [row for path in files.trained for row in _read_rows(load_file(path))]
        if rows:
            yield build_record(files.step, rows, {"learner_version": max(files.step - 1, 0)})


def _read_rows(batch: Fields) -> Iterator[DumpRow]:
    ids, attended = _matrix(batch, "sequences"), _matrix(batch, "attention_mask")
    answers = _matrix(batch, "response_mask")
    mask = _matrix(batch, "loss_mask")
    if ids is None or attended is None or answers is None or ids.shape != attended.shape:
        raise batch.error("sequences", "a matrix like `attention_mask`, with a `response_mask`")
    columns = {name: _matrix(batch, key) for name, key in COLUMNS.items()}
    present = {name: column for name, column in columns.items() if column is not None}
    for column in (*present.values(), *([] if mask is None else [mask])):
        if column.shape != answers.shape or len(answers) != len(ids):
            raise batch.error("response_mask", "as large as the columns of the response")
    start = ids.shape[1] - answers.shape[1]
    if start < 0 or not np.isfinite(ids).all() or (np.abs(ids) >= 2**31).any():
        raise batch.error("sequences", "a matrix of token ids")
    for index, answer in enumerate(answers != 0):
        places = np.flatnonzero(answer)
        first = start + int(places[0]) if len(places) else ids.shape[1]
        row = DumpRow(
            prompt_ids=ids[index, :first][attended[index, :first] != 0].astype(np.int64),
            token_ids=ids[index, start + places].astype(np.int64),
            loss_mask=(np.ones(len(places)) if mask is None else mask[index, places]) != 0,
            tokens={name: column[index, places] for name, column in present.items()},
        )
        constant_advantage(row)
        yield row


def _matrix(batch: Fields, name: str) -> np.ndarray | None:
    """Return a matrix; None if it was not dumped."""
    value = batch.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not is_plain(value):
        raise batch.error(name, "a matrix")
    refuse_large_batch(value.numel(), batch.where)
    return value.to(torch.float64).numpy()
