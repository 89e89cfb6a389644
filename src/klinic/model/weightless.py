"""Tensors with a shape but no data, and a meter of the memory they would take.

A model made of them runs the same code as a real run: sampling, scoring, backward pass and update.
Nothing is computed, and every tensor is counted from allocation to release, so the memory that
autograd retains is measured instead of guessed.

torch's meta device alone does not suffice: autocast does not support it, and attention selects its
kernel, and with it its memory, by device. These tensors report that they are on the CPU.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

CPU, META = torch.device("cpu"), torch.device("meta")
READ = torch.ops.aten._local_scalar_dense.default  # called by float(), int() and bool()


class Meter:
    """Bytes of live tensors by kind, and of those at the peak."""

    def __init__(self, kind_of: Callable[[Tensor], str]) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kind_of = kind_of
        self._label: str | None = None
        self._known = WeakIdKeyDictionary()
        self._shapes: dict[Any, tuple[Any, ...]] = {}

    def begin(self) -> None:
        """Reset the peak to the tensors that are live now."""
        gc.collect()  # free tensors that are only held by reference cycles
        self.peak = self.live.copy()

    @contextmanager
    def label(self, kind: str) -> Iterator[None]:
        """Count tensors allocated within the context as this kind."""
        before, self._label = self._label, kind
        try:
            yield
        finally:
            self._label = before

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed; a view has no storage of its own."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        kind = self._label or self._kind_of(tensor)
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self._forget, kind, storage.nbytes())
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _forget(self, kind: str, num_bytes: int) -> None:
        self.live[kind] -= num_bytes

    def run(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one torch operation on shapes alone."""
        args, kwargs = _shapes(args), {name: _shapes(value) for name, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = META
        key = _key(operation, args, kwargs)
        if key is not None and key in self._shapes:
            size, stride, dtype = self._shapes[key]
            return self.wrap(torch.empty_strided(size, stride, dtype=dtype, device=META))
        result = operation(*args, **kwargs)
        if key is not None and isinstance(result, Tensor) and self._is_new(result):
            self._shapes[key] = (result.size(), result.stride(), result.dtype)
        return self.wrap(result)

    def _is_new(self, result: Tensor) -> bool:
        return result.untyped_storage() not in self._known

    def wrap(self, result: Any) -> Any:
        """Wrap an operation's results as counted tensors."""
        if isinstance(result, Tensor):
            return Weightless(result, self)
        if isinstance(result, list | tuple):
            return type(result)(self.wrap(entry) for entry in result)
        return result


class Weightless(Tensor):
    """A tensor that reports the CPU and holds no data; reading a scalar gives 1 or False."""

    __module__ = "torch"  # klinic's formulas select the array library by the input's module
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    only_shape: Tensor
    meter: Meter

    @staticmethod
    def __new__(cls, shape: Tensor, meter: Meter) -> "Weightless":  # noqa: D102
        made: Weightless = Tensor._make_wrapper_subclass(
            cls,
            shape.size(),
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=shape.dtype,
            device=CPU,
        )
        return made

    def __init__(self, shape: Tensor, meter: Meter) -> None:
        self.only_shape, self.meter = shape, meter
        meter.count(shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is READ:
            return args[0].dtype != torch.bool and torch.ones((), dtype=args[0].dtype).item()
        meter = next(_weightless(args)).meter
        result = meter.run(operation, args, kwargs or {})
        if operation._schema.is_mutable:
            return None if result is None else args[0]
        return result

    def numpy(self, **_: Any) -> Any:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=self.dtype).numpy()

    def tolist(self) -> Any:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Weightless":
        if id(self) not in memo:
            copied: Any = Weightless(torch.empty_like(self.only_shape), self.meter)
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = (
                nn.Parameter(copied, requires_grad=self.requires_grad) if is_parameter else copied
            )
        made: Weightless = memo[id(self)]
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Weightless({tuple(self.shape)}, {self.dtype})"


def without_weights(model: nn.Module, meter: Meter) -> nn.Module:
    """Replace a model's tensors by tensors without data; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    originals = []  # keeps them alive, so that no id is reused
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    originals.append(tensor)
                    bare = Weightless(tensor.detach().to(META), meter)
                    trained = tensor.requires_grad
                    made[id(tensor)] = (
                        nn.Parameter(bare, requires_grad=trained)
                        if isinstance(tensor, nn.Parameter)
                        else bare
                    )
                own[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _weightless(values: Any) -> Iterator[Weightless]:
    for value in values:
        if isinstance(value, Weightless):
            yield value
        elif isinstance(value, list | tuple):
            yield from _weightless(value)


def _shapes(value: Any) -> Any:
    if isinstance(value, Weightless):
        return value.only_shape
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, list | tuple):
        return type(value)(_shapes(entry) for entry in value)
    return value


def _key(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a cache key of the result's shape; None where the result may alias an input.

    Layers repeat the same shapes, so a computed shape is reused.
    """
    if _shares(operation):
        return None
    key = (operation, _described(args), _described(tuple(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


@cache
def _shares(operation: Any) -> bool:
    """Whether a result may be an input, or a view of one."""
    schema = operation._schema
    return any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_described(entry) for entry in value)
    return type(value), value  # 1 and 1.0 are equal but give different dtypes
