"""Authority on what the interpreter works out once and remembers; every value stays what it was, bit by bit."""

import functools
import math
from typing import ClassVar

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

from harness.interpreter import blocks, functions, operators
from harness.interpreter.blocks import common_shape, name, shaped

# NOTE [Shortcuts]
# Of the 80 us that an operation on a small tile takes in the stock interpreter numpy has two. The rest makes and
# compares types that are the same every time, stretches operands that numpy stretches by itself, and looks for an
# overflow of integers by ten more such operations whose answer only a debug build reads. So types of blocks are shared,
# and what Triton decides about operands is asked once for each pair of element types: of the stock code, whose
# promotions and errors stay. Nine of ten operations of our kernels need no decision: a product of fp32 tiles, a masked
# load, a new axis. Those never reach the stock code (`operators`, `functions`), and what they make is not checked again
# (`blocks`). All of it gives the bits, types and errors that the stock code gives.

_CHECKED = tl.load.__code__  # of every function of the language: a check, then the call of what it wraps
_NARROW = {"bf16", "fp16"}
_WIDE = {"fp32", "fp64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
_SOLID = _NARROW | _WIDE
_OPERANDS = (tl.tensor, int, float)
_MOST_DECISIONS = 2**14  # loop counters are numbers too
_PLAIN = {
    **{(tl.tensor, name): plain for name, plain in {**operators.METHODS, **functions.METHODS}.items()},
    **{(home, name): plain for home in (tl, tl.core) for name, plain in functions.FUNCTIONS.items()},
}


def take() -> None:
    """Make every replacement; the language must not have been patched for the interpreter before."""
    blocks.share()
    stock.interpreter_semantic.__class__ = Semantic
    stock._patch_attr = _patch_attr
    object.__setattr__(stock.interpreter_builder.options, "sanitize_overflow", False)


def _patch_attr(obj, name, member, builder, scope) -> None:
    """A function of the language outside a compiler; without its own check that it is inside one."""
    if getattr(member, "__code__", None) is _CHECKED:
        member = member.__wrapped__
    semantic = stock.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    plain = _PLAIN.get((obj, name))
    if plain is None:
        scope.set_attr(obj, name, call)
    else:
        scope.set_attr(obj, name, functools.update_wrapper(plain(call), call))


class Semantic(TritonSemantic):
    """Triton's rules about operands, each asked once. See NOTE [Shortcuts]."""

    _decisions: ClassVar[dict[tuple, tuple[tl.tensor, tl.tensor]]] = {}

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        """Both operands with the types that they are combined in; what is in them numpy will stretch."""
        rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if not isinstance(lhs, _OPERANDS) or not isinstance(rhs, _OPERANDS):
            return super().binary_op_type_checking_impl(lhs, rhs, *rules)  # which will refuse them
        left, right = self._decision(lhs, rhs, rules)
        lhs = self.cast(lhs, left.dtype) if isinstance(lhs, tl.tensor) else left
        rhs = self.cast(rhs, right.dtype) if isinstance(rhs, tl.tensor) else right
        return self._in_common(lhs, rhs, lambda x, shape: x.handle)

    def broadcast_impl_value(self, lhs, rhs):
        return self._in_common(lhs, rhs, _stretched)

    def _in_common(self, lhs, rhs, handle):
        """Both operands as blocks of their common shape, where that is not their own with the handle that is given."""
        left, right = lhs.type.sizes, rhs.type.sizes
        if left == right:
            return lhs, rhs
        shape = common_shape(left, right)
        if left != shape:
            lhs = self.tensor(handle(lhs, shape), tl.block_type(lhs.dtype, shape))
        if right != shape:
            rhs = self.tensor(handle(rhs, shape), tl.block_type(rhs.dtype, shape))
        return lhs, rhs

    def _decision(self, lhs, rhs, rules: tuple[bool, ...]) -> tuple[tl.tensor, tl.tensor]:
        """What the stock rules make of one element of each operand: of a number its value, of a tensor its type."""
        key = _kind(lhs), _kind(rhs), rules
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) > _MOST_DECISIONS:
                self._decisions.clear()
            found = super().binary_op_type_checking_impl(_element(lhs), _element(rhs), *rules)
            self._decisions[key] = found
        return found

    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        if input.dtype is dst_ty:
            return input
        want = dst_ty.scalar
        if fp_downcast_rounding is None and _is_one_conversion(input.dtype.name, want.name):
            return self.tensor(self.builder.cast_impl(input.handle, want), shaped(want, input.type.sizes))
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def bitcast(self, input, dst_ty):
        have, want = input.dtype, dst_ty.scalar
        if have is not want and have.name in _SOLID and want.name in _SOLID and have.itemsize == want.itemsize:
            return self.tensor(self.builder.create_bitcast(input.handle, want), shaped(want, input.type.sizes))
        return super().bitcast(input, dst_ty)

    def to_tensor(self, x, check_type=True):
        return x if type(x) is tl.tensor else super().to_tensor(x, check_type)


@functools.cache
def _is_one_conversion(have: str, want: str) -> bool:
    """Whether a cast is no more than one conversion by the builder; all of its conversions are one."""
    if have in _NARROW:
        return want == "fp32"
    return have != want and have in _WIDE | {"int1"} and want in _SOLID


def _kind(operand: object) -> tuple:
    """What the rules look at: the element type of a tensor, a number with its type and its sign."""
    if isinstance(operand, tl.tensor):
        return name(operand.dtype)
    return type(operand), operand, math.copysign(1.0, operand)


def _element(operand: object) -> object:
    if not isinstance(operand, tl.tensor):
        return operand
    kind = operand.dtype
    return tl.tensor(TensorHandle(np.zeros(1, stock._get_np_dtype(kind)), kind), kind)


def _stretched(x: tl.tensor, shape: tuple[int, ...]) -> TensorHandle:
    return TensorHandle(np.broadcast_to(x.handle.data, shape), x.handle.dtype)
