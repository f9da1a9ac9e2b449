"""Authority on operators of tensors about whose operands nothing is to be decided: they are numpy's at once."""

from collections.abc import Callable

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock

from harness.interpreter.blocks import joined, made, shaped

# NOTE [Operators]
# Two operands of one plain element type are combined in that type, whatever the operator: the shape is all that is left
# to find. A number is an operand like them if Triton takes it for one of the tensor's own type, both as a number and as
# the tensor that some versions make of it first; asked once for each number. Everything else (other element types, of
# which Triton wraps some and the repairs decode some, and operands that it refuses) goes the way of the stock code.

Stock = Callable[..., tl.tensor]

INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
FLOATING = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
ARITHMETIC = FLOATING | INTEGERS
BITS = INTEGERS | {"int1": np.dtype(bool)}

_MOST_NUMBERS = 2**14  # loop counters are numbers too
_NUMBERS = (int, float, bool)
_UNKNOWN = object()


def _binary(operation: Callable, kinds: dict[str, np.dtype], division: bool = False, reflected: bool = False):
    """An operator whose result has the type of its operands."""

    def of(by_stock: Stock) -> Stock:
        numbers = _Numbers(reflected, division)

        def call(x, y, _semantic=None):
            kind = x.dtype
            if kind.name not in kinds:
                return by_stock(x, y)
            type_, held, left = x.type, x.handle.dtype, x.handle.data
            if type(y) is tl.tensor:
                if reflected:  # two tensors never come here by an operator
                    return by_stock(x, y)
                if y.dtype is not kind:
                    if not _are_integers(kind, y.dtype):
                        return by_stock(x, y)
                    kind = held = tl.int64
                if y.type is not type_:
                    type_ = joined(kind, type_, y.type)
                data = operation(left, y.handle.data)
            else:
                number = numbers.of(x, y)
                if number is None:
                    return by_stock(x, y)
                data = operation(number, left) if reflected else operation(left, number)
            return made(data, held, kind, type_) if data.dtype is kinds[kind.name] else by_stock(x, y)

        return call

    return of


def _comparison(operation: np.ufunc):
    """An operator whose result is truth; what holds it keeps the element type of the operands, as in stock."""

    def of(by_stock: Stock) -> Stock:
        numbers = _Numbers(reflected=False, division=False)

        def call(x, y, _semantic=None):
            kind = x.dtype
            if kind.name not in ARITHMETIC:
                return by_stock(x, y)
            type_, held = x.type, x.handle.dtype
            if type(y) is tl.tensor:
                if y.dtype is not kind:
                    if not _are_integers(kind, y.dtype):
                        return by_stock(x, y)
                    held = tl.int64
                number = y.handle.data
                type_ = joined(tl.int1, type_, y.type)
            else:
                number = numbers.of(x, y)
                if number is None:
                    return by_stock(x, y)
                type_ = shaped(tl.int1, type_.sizes)
            return made(operation(x.handle.data, number), held, tl.int1, type_)

        return call

    return of


def _are_integers(kind: tl.dtype, other: tl.dtype) -> bool:
    """Of different widths: of which numpy and Triton both take the wider."""
    return kind.name in INTEGERS and other.name in INTEGERS


def _addition(by_stock: Stock) -> Stock:
    """Also of an offset to pointers: in bytes, modulo 2^64."""
    plain = _binary(np.add, ARITHMETIC)(by_stock)

    def call(x, y, _semantic=None):
        kind, type_ = x.dtype, x.type
        if type(kind) is not tl.pointer_type:
            return plain(x, y)
        if type(y) is tl.tensor and y.dtype.name in INTEGERS:
            offset = y.handle.data
            if y.type.sizes != type_.sizes:
                type_ = joined(kind, type_, y.type)
        elif type(y) is int and -(2**31) <= y < 2**31:
            offset = np.array([y])
        else:
            return by_stock(x, y)
        step = max(1, x.handle.get_element_ty().primitive_bitwidth // 8)
        return made(x.handle.data + step * offset.astype(np.uint64), x.handle.dtype, kind, type_)

    return call


def _quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of integers, rounded to zero."""
    return (left - np.fmod(left, right)) // right


def where(by_stock: Stock) -> Stock:
    """`tl.where` of truth and two operands."""
    right, left = _Numbers(reflected=False, division=False), _Numbers(reflected=True, division=False)

    def call(condition, x, y, _semantic=None):
        tensor = x if type(x) is tl.tensor else y
        if type(condition) is type(tensor) is tl.tensor and condition.dtype is tl.int1:
            kind, type_ = tensor.dtype, tensor.type
            want = ARITHMETIC.get(kind.name)
            if want is not None:
                if tensor is y:
                    first, second = left.of(y, x), y.handle.data
                elif type(y) is not tl.tensor:
                    first, second = x.handle.data, right.of(x, y)
                elif y.dtype is kind:
                    first, second = x.handle.data, y.handle.data
                    type_ = joined(kind, type_, y.type)
                else:
                    first = second = None
                if first is not None and second is not None:
                    data = np.where(condition.handle.data, first, second)
                    if data.dtype is want:
                        return made(data, kind, kind, joined(kind, condition.type, type_))
        return by_stock(condition, x, y)

    return call


class _Numbers:
    """What an operator takes each number for, beside a tensor: `[1]` of the tensor's own element type, or None."""

    def __init__(self, reflected: bool, division: bool):
        self.reflected = reflected
        self.rules = (False, False, True, division)
        self.known: dict[tuple, np.ndarray | None] = {}

    def of(self, x: tl.tensor, number: object) -> np.ndarray | None:
        if type(number) is tl.constexpr:
            number = number.value
        if type(number) not in _NUMBERS:
            return None
        key = x.dtype.name, type(number), number or str(number)  # zeros have signs
        found = self.known.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            if len(self.known) > _MOST_NUMBERS:
                self.known.clear()
            found = self.known[key] = self.ask(x, number)
        return found

    def ask(self, x: tl.tensor, number: int | float | bool) -> np.ndarray | None:
        semantic = stock.interpreter_semantic
        try:
            first, second = (self.decided(x, y) for y in (number, semantic.to_tensor(number)))
        except Exception:  # the stock code will say why
            return None
        return first if first is not None and second is not None and first.tobytes() == second.tobytes() else None

    def decided(self, x: tl.tensor, y: int | float | bool | tl.tensor) -> np.ndarray | None:
        rules = stock.interpreter_semantic.binary_op_type_checking_impl
        left, right = rules(y, x, *self.rules) if self.reflected else rules(x, y, *self.rules)
        own, other = (right, left) if self.reflected else (left, right)
        return other.handle.data if own.dtype is other.dtype is x.dtype else None


METHODS = {
    "__add__": _addition,
    "__radd__": _binary(np.add, ARITHMETIC, reflected=True),
    "__sub__": _binary(np.subtract, ARITHMETIC),
    "__rsub__": _binary(np.subtract, ARITHMETIC, reflected=True),
    "__mul__": _binary(np.multiply, ARITHMETIC),
    "__rmul__": _binary(np.multiply, ARITHMETIC, reflected=True),
    "__truediv__": _binary(np.divide, FLOATING, division=True),
    "__rtruediv__": _binary(np.divide, FLOATING, division=True, reflected=True),
    "__floordiv__": _binary(_quotient, INTEGERS, division=True),
    "__mod__": _binary(np.fmod, INTEGERS, division=True),
    "__and__": _binary(np.bitwise_and, BITS),
    "__or__": _binary(np.bitwise_or, BITS),
    "__lt__": _comparison(np.less),
    "__le__": _comparison(np.less_equal),
    "__gt__": _comparison(np.greater),
    "__ge__": _comparison(np.greater_equal),
    "__eq__": _comparison(np.equal),
    "__ne__": _comparison(np.not_equal),
}
