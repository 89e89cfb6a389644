"""What every run of a test leaves as it was."""

import pytest


@pytest.fixture
def warm(warm_starts, as_before, monkeypatch):
    """Torch's settings as they were, and warm starts that others made."""
    monkeypatch.setenv("KLINIC_CACHE", str(warm_starts))


@pytest.fixture
def as_before(tmp_path, monkeypatch):
    """A cache of its own, and torch's settings as they were."""
    import torch

    monkeypatch.setenv("KLINIC_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
