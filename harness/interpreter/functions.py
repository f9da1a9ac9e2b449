"""Authority on the functions of the language that kernels call most: in plain use straight to the builder."""

import inspect
from collections.abc import Callable

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from harness.interpreter.blocks import made, shaped
from harness.interpreter.operators import where

Stock = Callable[..., object]

_ALL = slice(None)
_AXES = {slice, type(None)}
# What is left of a builder method's arguments: cache policies, which it does not look at, and whether it is volatile.
_UNREAD = (None,) * (len(inspect.signature(InterpreterBuilder.create_masked_load).parameters) - 5)
_POLICIES = {"eviction_policy": ("", "evict_first", "evict_last")}
_NUMBERS = (int, float)
_MOST_VALUES = 2**10

_everywhere: dict[tuple[int, ...], TensorHandle] = {}
_others: dict[tuple, TensorHandle | None] = {}
_products: dict[tuple, tuple] = {}
# With the ways of naming a precision whose meaning is fixed; for narrow factors it means nothing.
_FACTORS = {"fp32": (str,), "bf16": (str, type(None)), "fp16": (str, type(None))}


def _load(by_stock: Stock) -> Stock:
    def load(pointer, mask=None, other=None, *more, **options):
        place = _plain_pointer(pointer, more, options)
        if place is None or not _is_mask(mask, pointer) or (mask is None and other is not None):
            return by_stock(pointer, mask, other, *more, **options)
        if mask is not None and pointer.type.sizes != mask.type.sizes:
            pointer, mask = stock.interpreter_semantic.broadcast_impl_value(pointer, mask)
        values = None
        if other is not None:
            if type(other) not in _NUMBERS:
                return by_stock(pointer, mask, other, *more, **options)
            values = _filled(other, place, pointer)
        builder = stock.interpreter_builder
        masks = _everywhere_like(pointer) if mask is None else mask.handle
        handle = builder.create_masked_load(pointer.handle, masks, values, *_UNREAD, False)
        return made(handle.data, handle.dtype, place, shaped(place, pointer.type.sizes))

    return load


def _store(by_stock: Stock) -> Stock:
    def store(pointer, value, mask=None, *more, **options):
        place = _plain_pointer(pointer, more, options)
        if place is None or pointer.dtype.const or type(value) is not tl.tensor or not _is_mask(mask, pointer):
            return by_stock(pointer, value, mask, *more, **options)
        sizes = pointer.type.sizes
        if value.type.sizes != sizes or (mask is not None and mask.type.sizes != sizes):
            return by_stock(pointer, value, mask, *more, **options)
        value = stock.interpreter_semantic.cast(value, place)
        masks = _everywhere_like(pointer) if mask is None else mask.handle
        done = stock.interpreter_builder.create_masked_store(pointer.handle, value.handle, masks, *_UNREAD)
        return tl.tensor(done, tl.void)

    return store


def _plain_pointer(pointer: object, more: tuple, options: dict[str, object]) -> tl.dtype | None:
    """What is pointed to, where nothing but how it is cached is asked for."""
    if more or type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    options.pop("_semantic", None)
    if options and not all(name in _POLICIES and value in _POLICIES[name] for name, value in options.items()):
        return None
    place = pointer.dtype.element_ty
    return None if place.is_ptr() or place.name == "int1" else place


def _is_mask(mask: object, pointer: tl.tensor) -> bool:
    if mask is None:
        return True
    return type(mask) is tl.tensor and mask.dtype is tl.int1 and (bool(pointer.type.sizes) or not mask.type.sizes)


def _everywhere_like(pointer: tl.tensor) -> TensorHandle:
    """A mask that leaves nothing out."""
    shape = pointer.handle.data.shape
    if shape not in _everywhere:
        _everywhere[shape] = TensorHandle(np.ones(shape, bool), tl.int1)
    return _everywhere[shape]


def _filled(number: int | float, place: tl.dtype, pointer: tl.tensor) -> TensorHandle | None:
    """A number wherever nothing is loaded, as the stock code makes it of that; None where it lets zeros stand."""
    key = type(number), number or str(number), place.name, pointer.type.sizes
    if key not in _others:
        if len(_others) > _MOST_VALUES:
            _others.clear()
        semantic = stock.interpreter_semantic
        value = semantic.to_tensor(number)
        if pointer.type.sizes:
            value = semantic.broadcast_impl_value(pointer, value)[1]
        value = semantic.cast(value, place)
        _others[key] = value.handle if value else None
    return _others[key]


def _dot(by_stock: Stock) -> Stock:
    """The shapes and types of each product are looked at once, by the stock code."""

    def dot(input, other, acc=None, input_precision=None, *more, **options):
        options.pop("_semantic", None)
        given = (input, other) if acc is None else (input, other, acc)
        plain = not more and not options and all(type(x) is tl.tensor for x in given) and len(input.type.sizes) <= 3
        if not plain or type(input_precision) not in _FACTORS.get(input.dtype.name, ()):
            return by_stock(input, other, acc, input_precision, *more, **options)
        types = [x.type for x in given]
        key = (*map(id, types), input_precision)
        found = _products.get(key)
        if found is None:
            result = by_stock(input, other, acc, input_precision)
            precision = stock.interpreter_semantic._str_to_dot_input_precision(input_precision or "ieee")
            _products[key] = result.type, _zeros(result.type), precision, types
            return result
        type_, start, precision, _ = found
        if acc is not None:
            start = acc.handle
        return tl.tensor(stock.interpreter_builder.create_dot(input.handle, other.handle, start, precision, 0), type_)

    return dot


def _zeros(type_: tl.dtype) -> TensorHandle:
    return TensorHandle(np.zeros(type_.sizes, stock._get_np_dtype(type_)), type_.scalar)


def _index(by_stock: Stock) -> Stock:
    """Of a block with everything of its own axes and one new one."""

    def index(x, slices, _semantic=None):
        sizes = x.type.sizes
        if type(slices) is tuple and len(slices) == len(sizes) + 1 and set(map(type, slices)) == _AXES:
            axis, data = slices.index(None), x.handle.data
            if slices.count(_ALL) == len(sizes) and data.shape == sizes:
                shape = (*sizes[:axis], 1, *sizes[axis:])
                kind = x.dtype
                return made(data.reshape(shape), x.handle.dtype, kind, shaped(kind, shape))
        return by_stock(x, slices)

    return index


def _to(by_stock: Stock) -> Stock:
    def to(x, dtype, *how, **options):
        options.pop("_semantic", None)
        if how or not isinstance(dtype, tl.dtype) or (options and options != {"bitcast": True}):
            return by_stock(x, dtype, *how, **options)
        if options:
            return stock.interpreter_semantic.bitcast(x, dtype)
        return stock.interpreter_semantic.cast(x, dtype)

    return to


METHODS = {"__getitem__": _index, "to": _to}
FUNCTIONS = {"load": _load, "store": _store, "dot": _dot, "where": where}
