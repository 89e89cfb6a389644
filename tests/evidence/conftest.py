"""Records as users meet them, without the type checks that tests run under."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch):
    """Turn annotations off, so that klinic's own refusal is what speaks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
