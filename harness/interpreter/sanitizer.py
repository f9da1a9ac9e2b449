"""Authority on memory faults in the interpreter: out of bounds, never written, races between programs, double stores."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import triton
import triton.runtime.interpreter as stock
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

GRANULE = 2  # bytes that share one entry of the shadow memory: the smallest element that kernels here store
NOBODY = -1
_UNWRITTEN_FACTORIES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_LIBRARY = (os.path.dirname(triton.__file__), os.path.dirname(__file__))


class MemoryFault(Exception):
    """What a GPU would not have reported: names the fault, the kernel, the program, the argument and the source line."""


class _UnwrittenStorages(TorchDispatchMode):
    """Which storages were allocated without a value, byte range by byte range, until somebody writes them."""

    def __init__(self):
        super().__init__()
        self.shadow: dict[int, np.ndarray] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        unwritten = function.overloadpacket.__name__ in _UNWRITTEN_FACTORIES
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for tensor, declared in zip(outputs, function._schema.returns):
            if isinstance(tensor, torch.Tensor) and declared.alias_info is None:
                self._allocated(tensor, unwritten)
        for value, declared in zip(args, function._schema.arguments):
            if declared.alias_info is not None and declared.alias_info.is_write and isinstance(value, torch.Tensor):
                self.shadow.pop(value.untyped_storage().data_ptr(), None)
        return out

    def _allocated(self, tensor: torch.Tensor, unwritten: bool) -> None:
        storage = tensor.untyped_storage()
        self.shadow.pop(storage.data_ptr(), None)
        if unwritten and storage.nbytes():
            self.shadow[storage.data_ptr()] = np.ones(storage.nbytes() // GRANULE + 1, bool)


class _Launch:
    """The memory of one launch: the storages of its tensor arguments, who wrote and who read each granule."""

    def __init__(self, kernel: str, arguments: Iterable[tuple[str, torch.Tensor]], unwritten: dict[int, np.ndarray]):
        self.kernel = kernel
        ranges: dict[int, tuple[int, str]] = {}
        for name, tensor in arguments:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                ranges.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        starts = sorted(ranges)
        self.starts = np.array(starts, np.uint64)
        self.ends = np.array([start + ranges[start][0] for start in starts], np.uint64)
        self.names = [ranges[start][1] for start in starts]
        sizes = [ranges[start][0] // GRANULE + 1 for start in starts]
        self.writer = [np.full(size, NOBODY, np.int64) for size in sizes]
        self.reader = [np.full(size, NOBODY, np.int64) for size in sizes]
        self.unwritten = [unwritten.get(start) for start in starts]

    def fault(self, kind: str, storage: int | None, detail: str) -> MemoryFault:
        argument = "" if storage is None else f", argument {self.names[storage]}"
        place = stock.interpreter_builder.grid_idx
        return MemoryFault(f"{kind}: kernel {self.kernel}, program {place}{argument}, {_kernel_line()}: {detail}")

    def locate(self, pointers: np.ndarray, size: int, action: str) -> np.ndarray:
        """The storage of each address."""
        found = np.searchsorted(self.starts, pointers, side="right").astype(np.int64) - 1
        if not len(self.starts):
            raise self.fault(f"out-of-bounds {action}", None, f"{pointers.size} lanes, and no tensor argument")
        outside = (found < 0) | (pointers + np.uint64(size) > self.ends[np.maximum(found, 0)])
        if outside.any():
            nearest = int(np.maximum(found[outside][0], 0))
            detail = f"{int(outside.sum())} of {pointers.size} lanes outside every tensor argument"
            raise self.fault(f"out-of-bounds {action}", nearest, detail)
        return found

    def access(self, pointers, mask, writes: bool, atomic: bool = False) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lanes = np.broadcast_to(np.asarray(getattr(mask, "data", mask)), pointers.data.shape)
        addresses = np.asarray(pointers.data)[lanes]
        if not addresses.size:
            return
        storages = self.locate(addresses, size, "store" if writes else "load")
        grid, index = stock.interpreter_builder.grid_dim, stock.interpreter_builder.grid_idx
        program = (index[0] * grid[1] + index[1]) * grid[2] + index[2]
        for storage in np.unique(storages):
            offsets = ((addresses[storages == storage] - self.starts[storage]) // np.uint64(GRANULE)).astype(np.int64)
            self._check(int(storage), offsets, size, program, writes, atomic)

    def _check(self, storage: int, offsets, size: int, program: int, writes: bool, atomic: bool) -> None:
        unwritten, writer, reader = self.unwritten[storage], self.writer[storage], self.reader[storage]
        covered = (offsets[:, None] + np.arange(max(1, size // GRANULE))[None, :]).ravel()
        if unwritten is not None:
            if (not writes or atomic) and unwritten[covered].any():
                count = int(unwritten[covered].sum())
                raise self.fault("uninitialised read", storage, f"{count} of {covered.size} granules were never written")
            if writes:
                unwritten[covered] = False
        if atomic:
            return
        others = self._others(writer[offsets], program)
        if others is not None:
            action = "store to" if writes else "load from"
            raise self.fault("race", storage, f"{action} memory that program {others} stored to in this launch")
        if not writes:
            reader[offsets] = program
            return
        others = self._others(reader[offsets], program)
        if others is not None:
            raise self.fault("race", storage, f"store to memory that program {others} loaded in this launch")
        if np.unique(offsets).size != offsets.size and size >= GRANULE:
            raise self.fault("double store", storage, "several lanes of one store share an address")
        writer[offsets] = program

    @staticmethod
    def _others(owners: np.ndarray, program: int) -> int | None:
        foreign = owners[(owners != NOBODY) & (owners != program)]
        return int(foreign[0]) if foreign.size else None


def _kernel_line() -> str:
    """file:line of the kernel statement that is being interpreted."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _Sanitizer:
    """What is being watched: nothing outside `sanitize()`."""

    storages: _UnwrittenStorages | None = None
    launch: _Launch | None = None


@contextlib.contextmanager
def sanitize() -> Iterator[None]:
    """Inside the block every kernel access is checked; a fault raises `MemoryFault` from the launch.

    Tensors that torch allocates without a value inside the block count as never written until a kernel or an operation writes them.
    """
    before, storages = _Sanitizer.storages, _UnwrittenStorages()
    _Sanitizer.storages = storages
    try:
        with storages:
            yield
    finally:
        _Sanitizer.storages, _Sanitizer.launch = before, None


def _tensors(values: Iterable[tuple[str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values:
        value = value.base if type(value).__name__ == "TensorDescriptor" else value
        if hasattr(value, "data_ptr"):
            yield name, stock._unwrap_tensor(value)


def hook() -> None:
    """Let the interpreter report its launches and accesses here; nothing is looked at outside `sanitize()`."""
    arguments_of, load, store, atomic = (
        stock.GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_atomic_rmw,
    )

    def init_arguments(self, args, kwargs):
        on_host = arguments_of(self, args, kwargs)
        if _Sanitizer.storages is not None:
            named = [*zip(self.arg_names, on_host[0]), *on_host[1].items()]
            _Sanitizer.launch = _Launch(self.fn.__name__, _tensors(named), _Sanitizer.storages.shadow)
        return on_host

    def masked_load(self, pointers, mask, *args, **kwargs):
        if _Sanitizer.launch is not None:
            _Sanitizer.launch.access(pointers, mask, writes=False)
        return load(self, pointers, mask, *args, **kwargs)

    def masked_store(self, pointers, value, mask, *args, **kwargs):
        if _Sanitizer.launch is not None:
            _Sanitizer.launch.access(pointers, mask, writes=True)
        return store(self, pointers, value, mask, *args, **kwargs)

    def atomic_rmw(self, operation, pointer, value, mask, *args, **kwargs):
        if _Sanitizer.launch is not None:
            _Sanitizer.launch.access(pointer, mask, writes=True, atomic=True)
        return atomic(self, operation, pointer, value, mask, *args, **kwargs)

    stock.GridExecutor._init_args_hst = init_arguments
    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
    InterpreterBuilder.create_atomic_rmw = atomic_rmw
