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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

CPU, META = torch.device("cpu"), torch.device("meta")
READ_DEVICE = torch.ops.prim.device.default
READ_SCALAR = torch.ops.aten._local_scalar_dense.default  # called by float(), int() and bool()


@dataclass(slots=True)
class _Counted:
    """A storage that is counted."""

    kind: str
    num_bytes: int = 0


class MemoryMeter:
    """Bytes of live tensors by kind, and of those at the peak."""

    def __init__(self, kind_of: Callable[[Tensor], str]) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kind_of = kind_of
        self._label: str | None = None
        self._counted_storages = WeakIdKeyDictionary()  # of _Counted, by storage
        self._result_shapes: dict[Any, tuple[Any, ...]] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the tensors that are live now."""
        gc.collect()  # free tensors that are only held by reference cycles
        self.peak = self.live.copy()

    @contextmanager
    def count_as(self, kind: str) -> Iterator[None]:
        """Count tensors allocated within the context as this kind."""
        before, self._label = self._label, kind
        try:
            yield
        finally:
            self._label = before

    def count_storage(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed; a view has no storage of its own."""
        storage = tensor.untyped_storage()
        if storage in self._counted_storages:
            return
        counted = _Counted(kind=self._label or self._kind_of(tensor))
        self._counted_storages[storage] = counted
        weakref.finalize(storage, self._set_bytes, counted, 0)
        self._set_bytes(counted, storage.nbytes())

    def _set_bytes(self, counted: "_Counted", num_bytes: int) -> None:
        self.live[counted.kind] += num_bytes - counted.num_bytes
        counted.num_bytes = num_bytes
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def relabel(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors that exist already as another kind."""
        for tensor in tensors:
            counted = self._counted_storages[tensor.untyped_storage()]
            num_bytes = counted.num_bytes
            self._set_bytes(counted, 0)
            counted.kind = kind
            self._set_bytes(counted, num_bytes)

    @contextmanager
    def watch_resizing(self) -> Iterator[None]:
        """Count storages that are resized within the context, as FSDP2 frees gathered weights."""
        resize = torch.UntypedStorage.resize_

        def resize_counted(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            if storage in self._counted_storages:
                self._set_bytes(self._counted_storages[storage], storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_counted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def run_on_shapes(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one torch operation on shapes alone."""
        args, kwargs = _to_meta(args), {name: _to_meta(value) for name, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = META
        key = _shape_cache_key(operation, args, kwargs)
        if key is not None and key in self._result_shapes:
            size, stride, dtype = self._result_shapes[key]
            return self.wrap_result(torch.empty_strided(size, stride, dtype=dtype, device=META))
        result = operation(*args, **kwargs)
        if key is not None and isinstance(result, Tensor) and self._is_new_storage(result):
            self._result_shapes[key] = (result.size(), result.stride(), result.dtype)
        return self.wrap_result(result)

    def _is_new_storage(self, result: Tensor) -> bool:
        return result.untyped_storage() not in self._counted_storages

    def wrap_result(self, result: Any) -> Any:
        """Wrap an operation's results as counted tensors."""
        if isinstance(result, Tensor):
            return MetaTensor(result, self)
        if isinstance(result, list | tuple):
            return type(result)(self.wrap_result(entry) for entry in result)
        return result


class MetaTensor(Tensor):
    """A tensor that reports the CPU and holds no data; reading a scalar gives 1 or False."""

    __module__ = "torch"  # klinic's formulas select the array library by the input's module
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    meta: Tensor
    meter: MemoryMeter

    @staticmethod
    def __new__(cls, shape: Tensor, meter: MemoryMeter) -> "MetaTensor":  # noqa: D102
        # like torch's own fake tensors: it has the storage of a meta tensor, which FSDP2 resizes
        tensor: MetaTensor = Tensor._make_subclass(
            cls, shape, shape.requires_grad, dispatch_device=True, device_for_backend_keys=CPU
        )
        return tensor

    def __init__(self, shape: Tensor, meter: MemoryMeter) -> None:
        self.meta, self.meter = shape, meter
        meter.count_storage(shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is READ_DEVICE:
            return CPU
        if operation is READ_SCALAR:
            return args[0].dtype != torch.bool and torch.ones((), dtype=args[0].dtype).item()
        meter = next(_iter_meta_tensors(args)).meter
        result = meter.run_on_shapes(operation, args, kwargs or {})
        if operation._schema.is_mutable:
            return None if result is None else args[0]
        return result

    def numpy(self, **_: Any) -> Any:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=self.dtype).numpy()

    def tolist(self) -> Any:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MetaTensor":
        if id(self) not in memo:
            copied: Any = MetaTensor(torch.empty_like(self.meta), self.meter)
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = (
                nn.Parameter(copied, requires_grad=self.requires_grad) if is_parameter else copied
            )
        made: MetaTensor = memo[id(self)]
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Weightless({tuple(self.shape)}, {self.dtype})"


def replace_by_meta_tensors(model: nn.Module, meter: MemoryMeter) -> nn.Module:
    """Replace a model's tensors by tensors without data; shared tensors stay shared."""
    replacements: dict[int, Tensor] = {}
    originals = []  # keeps them alive, so that no id is reused
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    originals.append(tensor)
                    placeholder = MetaTensor(tensor.detach().to(META), meter)
                    trained = tensor.requires_grad
                    replacements[id(tensor)] = (
                        nn.Parameter(placeholder, requires_grad=trained)
                        if isinstance(tensor, nn.Parameter)
                        else placeholder
                    )
                registered[name] = replacements[id(tensor)]  # type: ignore[assignment]
    return model


def _iter_meta_tensors(values: Any) -> Iterator[MetaTensor]:
    for value in values:
        if isinstance(value, MetaTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iter_meta_tensors(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, MetaTensor):
        return value.meta
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(entry) for entry in value)
    return value


def _shape_cache_key(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a cache key of the result's shape; None where the result may alias an input.

    Layers repeat the same shapes, so a computed shape is reused.
    """
    if _may_alias(operation):
        return None
    key = (operation, _describe_argument(args), _describe_argument(tuple(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


@cache
def _may_alias(operation: Any) -> bool:
    """Whether a result may be an input, or a view of one."""
    schema = operation._schema
    return any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns))


def _describe_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_describe_argument(entry) for entry in value)
    return type(value), value  # 1 and 1.0 are equal but give different dtypes
