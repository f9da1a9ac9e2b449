"""Authority on which bytes of which tensors were never written: allocated without a value, untouched since."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_WITHOUT_A_VALUE = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_TORCH = {"aten", "prim", "prims"}


class UnwrittenBytes(TorchDispatchMode):
    """Inside this mode torch's allocations and writes are followed; `of` gives the bytes of a storage not written yet.

    Writes by kernels are reported by whoever runs them, by clearing entries of that array. Copying what was never
    written counts as writing the copy.
    """

    def __init__(self):
        super().__init__()
        # By the address of the storage's own record, which the weak reference keeps from being reused.
        self._bytes: dict[int, tuple[StorageWeakRef, np.ndarray]] = {}

    def of(self, storage: torch.UntypedStorage) -> np.ndarray | None:
        """bool `[bytes]`, True where never written; None for a storage that is not followed."""
        _, unwritten = self._bytes.get(storage._cdata, (None, None))
        return unwritten if unwritten is not None and len(unwritten) == storage.nbytes() else None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace in _TORCH:
            out = function(*args, **kwargs)
        else:
            with self:  # straight to the kernel of a custom operator, so that what it allocates is seen too
                out = function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        schema = function._schema
        if torch.Tag.inplace_view not in function.tags:  # those change a shape, not a value
            for declared, value in zip(schema.arguments, args):
                self._written(declared, value)
            for declared in schema.arguments:
                self._written(declared, kwargs.get(declared.name))
        if function.overloadpacket.__name__ in _WITHOUT_A_VALUE and schema.returns[0].alias_info is None:
            self._follow(out)
        return out

    def _follow(self, tensor: torch.Tensor) -> None:
        self._bytes = {key: entry for key, entry in self._bytes.items() if not entry[0].expired()}
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._bytes[storage._cdata] = (StorageWeakRef(storage), np.ones(storage.nbytes(), bool))

    def _written(self, declared, value) -> None:
        if value is not None and declared.alias_info is not None and declared.alias_info.is_write:
            for tensor in _plain_tensors(value):
                unwritten = self.of(tensor.untyped_storage())
                if unwritten is not None:
                    elements_of(tensor, unwritten)[...] = False


def elements_of(tensor: torch.Tensor, per_byte: np.ndarray) -> np.ndarray:
    """The entries of `per_byte` (one per byte of the storage) that a tensor's elements cover, `[*shape, itemsize]`."""
    size = tensor.element_size()
    strides = [stride * size * per_byte.itemsize for stride in tensor.stride()]
    first = per_byte[tensor.storage_offset() * size :]
    return np.lib.stride_tricks.as_strided(first, (*tensor.shape, size), (*strides, per_byte.itemsize))


def _plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """The CPU tensors in an argument; a subclass (fake, functional) has no bytes of its own."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        plain = type(item) in (torch.Tensor, torch.nn.Parameter)
        if plain and item.device.type == "cpu" and item.layout == torch.strided:
            yield item
