"""Authority on memory faults in the interpreter: out of bounds, never written, races of programs, double stores."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import triton
import triton.runtime.interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder

from harness.interpreter.shadow import UnwrittenBytes

NOBODY, SEVERAL = 0, -1  # owners of a byte; program p is p + 1, so that nobody is zeros, which cost nothing to allocate
# What a program may not do to bytes that another program touched, and which way of touching that is.
CONFLICTS = {"load": ("stored", "updated"), "update": ("stored", "loaded"), "store": ("stored", "loaded", "updated")}
_LIBRARY = (os.path.dirname(triton.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class MemoryFault(Exception):
    """What a GPU would not report; the message names the fault, kernel, program, argument and source line."""


class _Region:
    """One storage that a launch got: which arguments view it, and for each of its bytes who touched it.

    `views`: (first byte, end byte, argument). Only bytes between the first and the last element of some argument may
    be touched.
    """

    def __init__(self, storage: torch.UntypedStorage, unwritten: np.ndarray | None):
        self.start, self.size = storage.data_ptr(), storage.nbytes()
        self.views: list[tuple[int, int, str]] = []
        self.allowed = np.zeros(self.size, bool)
        self.unwritten = unwritten
        self.stored, self.loaded, self.updated = (np.zeros(self.size, np.int32) for _ in range(3))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) * size
        self.views.append((first, first + reach + size, name))
        self.allowed[first : first + reach + size] = True

    def argument_at(self, offset: int) -> str:
        """The argument that the byte belongs to, or the nearest one."""
        distance = lambda view: max(view[0] - offset, offset - view[1] + 1, 0)  # noqa: E731
        return min(self.views, key=distance)[2]


class _Launch:
    """The memory of one launch, and the check of each access to it."""

    def __init__(self, kernel: str, arguments: Iterable[tuple[str, torch.Tensor]], unwritten: UnwrittenBytes):
        self.kernel = kernel
        regions: dict[int, _Region] = {}
        for name, tensor in arguments:
            storage = tensor.untyped_storage()
            if tensor.numel():
                if storage.data_ptr() not in regions:
                    regions[storage.data_ptr()] = _Region(storage, unwritten.of(storage))
                regions[storage.data_ptr()].add(name, tensor)
        self.regions = [regions[start] for start in sorted(regions)]
        self.starts = np.array([region.start for region in self.regions], np.uint64)
        self.sizes = np.array([region.size for region in self.regions], np.int64)

    def access(self, pointers, mask, action: str) -> None:
        """Check the lanes of one load, store or atomic update ('update'), and remember them."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        lanes = np.broadcast_to(np.asarray(getattr(mask, "data", mask)), pointers.data.shape)
        addresses = np.asarray(pointers.data)[lanes]
        if not addresses.size:
            return
        if not self.regions:
            raise self.fault(f"out-of-bounds {action}", None, "no argument is a tensor with elements")
        which = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        which = np.maximum(which, 0)
        offsets = (addresses - self.starts[which]).astype(np.int64)  # negative before the first region
        self.check_bounds(which, offsets, size, action)
        if action == "store" and np.unique(addresses).size != addresses.size:
            argument = self.regions[which[0]].argument_at(int(offsets[0]))
            raise self.fault("double store", argument, "several lanes of one store share an address")
        program = self.program()
        for index in np.unique(which):
            covered = (offsets[which == index][:, None] + np.arange(size)).ravel()
            self.check_bytes(self.regions[index], covered, program, action)

    def check_bounds(self, which: np.ndarray, offsets: np.ndarray, size: int, action: str) -> None:
        inside = (offsets >= 0) & (offsets + size <= self.sizes[which])
        for index in np.unique(which[inside]):
            here = np.flatnonzero(inside & (which == index))
            allowed = self.regions[index].allowed
            inside[here] = allowed[offsets[here]] & allowed[offsets[here] + size - 1]
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
            region, offset = self.regions[which[first]], int(offsets[first])
            name = region.argument_at(offset)
            start, end = next(view[:2] for view in region.views if view[2] == name)
            where = f"the first at byte {offset - start} of {end - start}"
            raise self.fault(f"out-of-bounds {action}", name, f"{(~inside).sum()} of {inside.size} lanes, {where}")

    def check_bytes(self, region: _Region, covered: np.ndarray, program: int, action: str) -> None:
        if region.unwritten is not None:
            if action != "store" and region.unwritten[covered].any():
                first = int(covered[np.flatnonzero(region.unwritten[covered])[0]])
                count = int(region.unwritten[covered].sum())
                detail = f"{count} of {covered.size} bytes were never written"
                raise self.fault("uninitialised read", region.argument_at(first), detail)
            if action != "load":
                region.unwritten[covered] = False
        for done in CONFLICTS[action]:
            owners = getattr(region, done)[covered]
            foreign = np.flatnonzero((owners != NOBODY) & (owners != program + 1))
            if foreign.size:
                who = self.describe(int(owners[foreign[0]]))
                argument = region.argument_at(int(covered[foreign[0]]))
                raise self.fault("race", argument, f"{action} of memory that {who} {done} in this launch")
        owners = {"load": region.loaded, "store": region.stored, "update": region.updated}[action]
        before = owners[covered]
        owners[covered] = np.where((before == NOBODY) | (before == program + 1), program + 1, SEVERAL)

    def fault(self, kind: str, argument: str | None, detail: str) -> MemoryFault:
        place = "" if argument is None else f", argument {argument}"
        program = stock.interpreter_builder.grid_idx
        return MemoryFault(f"{kind}: kernel {self.kernel}, program {program}{place}, {_kernel_line()}: {detail}")

    @staticmethod
    def program() -> int:
        builder = stock.interpreter_builder
        return int(np.ravel_multi_index(builder.grid_idx, builder.grid_dim))

    @staticmethod
    def describe(owner: int) -> str:
        if owner == SEVERAL:
            return "other programs"
        return f"program {tuple(map(int, np.unravel_index(owner - 1, stock.interpreter_builder.grid_dim)))}"


def _kernel_line() -> str:
    """file:line of the kernel statement that is being interpreted."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _Sanitizer:
    """What is being watched: nothing outside `sanitize()`."""

    unwritten: UnwrittenBytes | None = None
    launch: _Launch | None = None


@contextlib.contextmanager
def sanitize() -> Iterator[None]:
    """Inside the block every kernel access is checked; a fault raises `MemoryFault` from the launch.

    Tensors that torch allocates without a value inside the block count as never written until a kernel or an operation
    writes them. Programs that order their accesses through atomics are reported as racing: that order is not seen.
    """
    before, unwritten = _Sanitizer.unwritten, UnwrittenBytes()
    _Sanitizer.unwritten = unwritten
    try:
        with unwritten:
            yield
    finally:
        _Sanitizer.unwritten, _Sanitizer.launch = before, None


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in one argument, with their names: itself, the base of a descriptor, the members of a tuple."""
    if isinstance(value, tuple):
        for index, member in enumerate(value):
            yield from _tensors(f"{name}[{index}]", member)
    elif type(value).__name__ == "TensorDescriptor":
        yield from _tensors(name, value.base)
    elif hasattr(value, "data_ptr"):
        yield name, stock._unwrap_tensor(value)


def hook() -> None:
    """Let the interpreter report its launches and accesses here; nothing is looked at outside `sanitize()`."""
    arguments_of = stock.GridExecutor._init_args_hst

    def init_arguments(self, args, kwargs):
        on_host = arguments_of(self, args, kwargs)
        if _Sanitizer.unwritten is not None:
            named = [*zip(self.arg_names, on_host[0]), *on_host[1].items()]
            tensors = (pair for name, value in named for pair in _tensors(name, value))
            _Sanitizer.launch = _Launch(self.fn.__name__, tensors, _Sanitizer.unwritten)
        return on_host

    stock.GridExecutor._init_args_hst = init_arguments
    # Positions of pointer and mask in each builder method; a compare-and-swap has no mask.
    for name, action, pointer, mask in (
        ("create_masked_load", "load", 0, 1),
        ("create_masked_store", "store", 0, 2),
        ("create_atomic_rmw", "update", 1, 3),
        ("create_atomic_cas", "update", 0, None),
    ):
        setattr(InterpreterBuilder, name, _checked(getattr(InterpreterBuilder, name), action, pointer, mask))


def _checked(method, action: str, pointer: int, mask: int | None):
    def call(self, *args, **kwargs):
        if _Sanitizer.launch is not None:
            _Sanitizer.launch.access(args[pointer], True if mask is None else args[mask], action)
        return method(self, *args, **kwargs)

    return call
