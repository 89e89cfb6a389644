"""Reads dumps that other trainers wrote with torch.save, for `klinic convert`.

    loading.py  loads a file with `weights_only`, and checks its tensors
    slime.py    rollout_data and train_data of slime and miles (--dump-details)
    skyrl.py    training batches of SkyRL (trainer.dump_data_batch), saved as tensors

Nothing of a file is executed: torch's `weights_only` loader builds tensors, numbers, texts, lists
and dicts, and refuses anything else.
"""

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.dumps.torch_files import TorchDump
from klinic.integrations.torch_dumps import skyrl, slime

READERS = {"slime": slime.open_dump, "miles": slime.open_dump, "SkyRL": skyrl.open_dump}


def open_torch_dump(dump: TorchDump) -> TokenDump:
    """Return the dump with the reader of its trainer."""
    if dump.trainer not in READERS:
        raise EvidenceError(f"{dump.folder}: no reader knows {dump.trainer}. Check the path.")
    return READERS[dump.trainer](dump)
