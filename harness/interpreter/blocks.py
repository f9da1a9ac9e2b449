"""Authority on how the interpreter makes types, tensors and their handles: what is the same every time only once."""

import functools
import types
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

common_shape = functools.cache(np.broadcast_shapes)
_make_tensor = tl.tensor.__init__
_shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}
_LEAVES = {tl.tensor, tl.dtype, tl.pointer_type, int, float, bool, str, types.NoneType}


def share() -> None:
    """Make every replacement; see NOTE [Shortcuts]."""
    _share_block_types()
    tl.tensor.__init__ = _init_tensor
    TensorHandle.__init__ = _checked(TensorHandle.__init__)
    tl.core._unwrap_if_constexpr = _leaves_first(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = _names_first(tl.dtype.__eq__)


def name(kind: tl.dtype) -> tuple:
    """What tells one element type from another; pointer types have no hash."""
    return kind.name, getattr(kind, "address_space", None)


def _share_block_types() -> None:
    """One object for each element type and shape; `sizes` of a type is its shape, () for a scalar."""
    make, known = tl.block_type.__init__, {}

    def new(cls, element_ty, shape):
        sizes = tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        key = name(element_ty), sizes
        if key not in known:
            made = object.__new__(cls)
            make(made, element_ty, list(sizes))
            made.sizes = sizes
            known[key] = made
        return known[key]

    tl.dtype.sizes = ()
    tl.block_type.__new__ = new
    tl.block_type.__init__ = lambda self, element_ty, shape: None
    tl.block_type.with_element_ty = lambda self, kind: shaped(kind, self.sizes)


def joined(kind: tl.dtype, left: tl.dtype, right: tl.dtype) -> tl.dtype:
    """The type of elements of `kind` in the shape that two types have in common.

    Raises ValueError where they have none.
    """
    if left.sizes == right.sizes:
        return shaped(kind, left.sizes)
    return shaped(kind, common_shape(left.sizes, right.sizes))


def shaped(kind: tl.dtype, sizes: tuple[int, ...]) -> tl.dtype:
    """The type of elements of `kind` in a shape; the kind itself for ()."""
    if not sizes:
        return kind
    try:
        return kind.shaped[sizes]
    except AttributeError:
        kind.shaped = {}
    except KeyError:
        pass
    found = kind.shaped[sizes] = tl.block_type(kind, sizes)
    return found


def _init_tensor(self, handle, type) -> None:
    """Shapes and sizes as kernels see them are one object for each shape."""
    sizes = type.sizes
    if sizes not in _shapes:
        _make_tensor(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[sizes]


def made(data: np.ndarray, held: tl.dtype, kind: tl.dtype, type_: tl.dtype) -> tl.tensor:
    """A tensor of what fits for certain: element type `held` of its handle and `kind` of its type."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, held, {}
    sizes = type_.sizes
    if sizes not in _shapes:
        return tl.tensor(handle, type_)
    tensor = object.__new__(tl.tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, type_, kind
    tensor.shape, tensor.numel = _shapes[sizes]
    return tensor


def _checked(make: Callable) -> Callable:
    """The check of an array's item size, by one look for each element type; what does not fit is for the stock code."""
    widest: dict[str, int] = {}

    def init(self, data, dtype, attr=None):
        most = widest.get(dtype.name)
        if most is None:
            most = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
            widest[dtype.name] = most
        if data.itemsize > most:
            make(self, data, dtype)
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return init


def _leaves_first(unwrap: Callable) -> Callable:
    def unwrap_if_constexpr(o):
        kind = type(o)
        if kind in _LEAVES:
            return o
        return o.value if kind is tl.constexpr else unwrap(o)

    return unwrap_if_constexpr


def _names_first(equal: Callable) -> Callable:
    plain = tl.dtype
    return lambda self, other: self.name == other.name if type(other) is plain else equal(self, other)
