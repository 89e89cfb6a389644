"""The kernels that MKL picks at a first call are picked before threads can race for them."""

import torch

from klinic.model import determinism


def test_every_function_is_called_once_in_both_precisions(monkeypatch):
    calls = []

    def recorder(name, function):
        def record(number):
            calls.append((name, number.dtype, number.numel()))
            return function(number)

        return record

    for name in determinism.VML_FUNCTIONS:
        monkeypatch.setattr(torch, name, recorder(name, getattr(torch, name)))
    determinism.initialize_vml_kernels.cache_clear()
    determinism.initialize_vml_kernels()
    determinism.initialize_vml_kernels()
    expected = [
        (n, d, 1) for d in (torch.float32, torch.float64) for n in determinism.VML_FUNCTIONS
    ]
    assert calls == expected


def test_worlds_settle_them_first(monkeypatch):
    from klinic.verify import toy_policies

    settled = []
    monkeypatch.setattr(toy_policies, "initialize_vml_kernels", lambda: settled.append(True))
    toy_policies.make_world("any", seed=0, drift=1.0)
    assert settled
