"""A CUDA device without hardware or numbers: shapes, dtypes, devices, autograd and autocast.

It needs the guard of cuda_guard.py. Tensors of any size cost nothing, so a vocabulary of 152,064
and a batch of thousands of tokens run in seconds. Two devices in one operation raise an error.
Whole numbers and masks keep their values where those follow from the host's (offsets, positions,
token ids); any other value that the host reads is 1 (False for a mask).

What this cannot show: wrong numbers, and mixed devices inside a fused optimizer kernel. The
stand-in device shows those.
"""

import contextlib
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from klinic.replay.host_waits import SIZED_BY_VALUES

aten = torch.ops.aten
MAX_KNOWN = 2**16  # entries of a tensor of whole numbers whose values are kept


class UnknownValuesError(Exception):
    """An argument is a fake tensor without values."""


def known_values(argument: Any) -> Any:
    """Return an argument with real CPU tensors in place of fake ones."""
    if isinstance(argument, FakeTensor):
        values = getattr(argument, "values_on_host", None)
        if values is None:
            raise UnknownValuesError
        return values
    if isinstance(argument, list | tuple):
        return type(argument)(known_values(one) for one in argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


class FakeCuda(FakeTensorMode):
    """Runs operations on fake tensors, and answers the reads of the host."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return read_number(args[0])
        if func in SIZED_BY_VALUES:
            return self._fake_like(_compute(func, args, kwargs), args[0].device)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = (args[0], self._indices(args[1]), *args[2:])
        result = super().dispatch(func, types, args, kwargs)
        _keep_values(result, func, args, kwargs)
        return result

    def _fake_like(self, real: Any, device: torch.device) -> Any:
        if isinstance(real, list | tuple):
            return type(real)(self._fake_like(one, device) for one in real)
        with self:
            fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        fake.values_on_host = real  # type: ignore[attr-defined]
        return fake

    def _indices(self, given: Any) -> list[Any]:
        """Return the indices with every mask as the positions it selects."""
        indices: list[Any] = []
        for index in given:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
                continue
            positions = _compute(aten.nonzero.default, (index,), {})
            indices += [self._fake_like(column, index.device) for column in positions.unbind(-1)]
        return indices


def read_number(tensor: torch.Tensor) -> Any:
    """Return the value of a tensor of one entry as the host reads it."""
    with unset_fake_temporarily():
        return _values_or_ones(tensor).item()


def _values_or_ones(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    values = getattr(tensor, "values_on_host", None)
    if values is not None:
        return values  # type: ignore[no-any-return]
    fill = torch.zeros if tensor.dtype == torch.bool else torch.ones
    return fill(tensor.shape, dtype=tensor.dtype)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        given = [_values_or_ones(a) if isinstance(a, torch.Tensor) else a for a in args]
        return func(*given, **kwargs)


def _keep_values(result: Any, func: Any, args: Any, kwargs: Any) -> None:
    is_small = isinstance(result, FakeTensor) and result.numel() <= MAX_KNOWN
    if not is_small or result.dtype.is_floating_point:
        return
    try:
        given, named = known_values(list(args)), {k: known_values(v) for k, v in kwargs.items()}
        with unset_fake_temporarily():
            result.values_on_host = func(*given, **named)
    except (UnknownValuesError, RuntimeError, NotImplementedError):
        result.values_on_host = None


@contextlib.contextmanager
def fake_cuda() -> Any:
    """Run a block with tensors of the device `cuda` that have no numbers."""
    plain = {name: getattr(torch.Tensor, name) for name in ("numpy", "tolist")}

    def numpy(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if isinstance(self, FakeTensor) and self.device.type == "cuda":
            raise TypeError("can't convert a cuda tensor to numpy")
        with unset_fake_temporarily():
            return plain["numpy"](_values_or_ones(self), *args, **options)

    def tolist(self: torch.Tensor) -> Any:
        host = self.cpu()  # the copy is what the host waits for
        with unset_fake_temporarily():
            return plain["tolist"](_values_or_ones(host))

    replaced = {
        "torch.Tensor.numpy": numpy,
        "torch.Tensor.tolist": tolist,
        "torch._subclasses.FakeTensor.tolist": tolist,
        # else transformers makes masks that it does not make on a GPU
        "transformers.masking_utils.is_tracing": lambda *_: False,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.current_device": lambda: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        stack.enter_context(FakeCuda())
        yield
