"""Authority on what is mended in Triton's interpreter, and how; `install` makes every replacement, once."""

import ast
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _ir

from harness import autotune
from harness.interpreter import sanitizer, schedule, shortcuts
from harness.interpreter.bfloat16 import decode, encode, handle_of, holds_bf16, values_of

_installed = False
_tf32 = False


def install() -> None:
    """Repair the interpreter of this process; needs no GPU and launches nothing.

    Does nothing when called again, or where kernels are compiled: the repaired language could not be.
    """
    global _installed
    if _installed or not triton.knobs.runtime.interpret:
        return
    _installed = True
    _repair_casts()
    _repair_arithmetic()
    _repair_dot()
    _repair_atomics()
    _repair_reductions()
    _repair_indexing()
    _repair_loops()
    autotune.pin()  # there is no driver to time with
    _repair_libdevice()
    shortcuts.take()
    _patch_language_once()
    sanitizer.hook()
    schedule.hook()
    _launch_on_fresh_stacks()


@contextlib.contextmanager
def tf32_operands() -> Iterator[None]:
    """Inside the block fp32 dots that allow tf32 drop the low 13 bits of their operands, as the hardware does."""
    global _tf32
    before, _tf32 = _tf32, True
    try:
        yield
    finally:
        _tf32 = before


def _repair_casts() -> None:
    convert, cast = stock._convert_float, InterpreterBuilder.cast_impl

    def convert_float(values, source, target, rounding):
        if source == tl.bfloat16 and target == tl.float32:
            return decode(values).view(np.uint32)
        if source == tl.float32 and target == tl.bfloat16:
            return encode(values, toward_zero=rounding == _ir.ROUNDING_MODE.RTZ)
        if source == tl.float32 and target == tl.float16 and rounding == _ir.ROUNDING_MODE.RTNE:
            return values.astype(np.float16).view(np.uint16)
        return convert(values, source, target, rounding)

    def cast_impl(self, source, target_type):
        have, want = source.dtype.scalar, target_type.scalar
        if want == tl.bfloat16 and have == tl.bfloat16:
            return source
        if want == tl.bfloat16 and have != tl.float32:
            return handle_of(source.data.astype(np.float32))
        if have == tl.bfloat16 and want != tl.float32:
            return TensorHandle(decode(source.data).astype(stock._get_np_dtype(target_type)), want)
        return cast(self, source, target_type)

    stock._convert_float = convert_float
    InterpreterBuilder.cast_impl = cast_impl
    names = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")
    for name in names:
        setattr(InterpreterBuilder, f"create_{name}", lambda self, source, target: self.cast_impl(source, target))
    InterpreterBuilder.create_int_cast = lambda self, source, target, signed: self.cast_impl(source, target)
    InterpreterBuilder.get_bf16 = lambda self, value: handle_of(np.array([value], np.float32))


def _repair_arithmetic() -> None:
    binary, unary, ternary, fma = (
        InterpreterBuilder.binary_op,
        InterpreterBuilder.unary_op,
        InterpreterBuilder.ternary_op,
        InterpreterBuilder.create_fma,
    )

    def binary_op(self, left, right, op):
        if not holds_bf16(left):
            return binary(self, left, right, op)
        out = op(decode(left.data), values_of(right))
        return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else handle_of(out)

    def unary_op(self, value, op):
        return handle_of(op(decode(value.data))) if holds_bf16(value) else unary(self, value, op)

    def ternary_op(self, a, b, c, op):
        if op is not np.where and holds_bf16(c):
            return handle_of(op(values_of(a), values_of(b), values_of(c)))
        return ternary(self, a, b, c, op)

    def create_fma(self, x, y, z):
        """One rounding: the product of two fp32 (or bf16) numbers is exact in float64."""
        if z.data.dtype == np.float32 or holds_bf16(z):
            exact = values_of(x).astype(np.float64) * values_of(y) + values_of(z)
            out = exact.astype(np.float32)
            return handle_of(out) if holds_bf16(z) else TensorHandle(out, z.dtype.scalar)
        return fma(self, x, y, z)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.ternary_op = ternary_op
    InterpreterBuilder.create_fma = create_fma
    if not hasattr(InterpreterBuilder, "create_fneg"):
        InterpreterBuilder.create_fneg = lambda self, value: self.unary_op(value, np.negative)


def _drop_low_bits(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _repair_dot() -> None:
    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, accumulator, input_precision, imprecise):
        if holds_bf16(a) or holds_bf16(b):
            return TensorHandle(np.matmul(values_of(a), values_of(b)) + accumulator.data, accumulator.dtype.scalar)
        if _tf32 and a.data.dtype == np.float32 and input_precision == _ir.INPUT_PRECISION.TF32:
            product = np.matmul(_drop_low_bits(a.data), _drop_low_bits(b.data))
            return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)
        return dot(self, a, b, accumulator, input_precision, imprecise)

    InterpreterBuilder.create_dot = create_dot
    allowed = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    object.__setattr__(stock.interpreter_builder.options, "allowed_dot_input_precisions", allowed)


def _repair_atomics() -> None:
    update = InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self, operation, pointer, value, mask, sem, scope):
        """An atomic addition is the only one on bf16 that the language has."""
        if not holds_bf16(value):
            return update(self, operation, pointer, value, mask, sem, scope)
        old, one = np.zeros_like(value.data), np.ones(1, bool)
        for lane in np.argwhere(mask.data):
            lane = tuple(lane)
            place = pointer.data[lane].reshape(1)
            old[lane] = stock._interpreter.load(place, one, np.zeros(1, np.uint16), np.dtype(np.uint16))[0]
            added = encode(decode(old[lane].reshape(1)) + decode(value.data[lane].reshape(1)))
            stock._interpreter.store(place, added, one)
        return TensorHandle(old, tl.bfloat16)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _added_in_pairs(data: np.ndarray, decode: Callable, encode: Callable) -> np.ndarray:
    """The sum over the first axis of numbers of 16 bits, each step rounded, as hardware adds what nobody widens."""
    while len(data) > 1:
        even = len(data) // 2 * 2
        data = np.concatenate([encode(decode(data[:even:2]) + decode(data[1:even:2])), data[even:]])
    return data[0]


def _repair_reductions() -> None:
    total, running = stock.ReduceOps.sum, stock.ScanOps.cumsum

    def reduce_sum(self, x):
        bf16, axis = holds_bf16(x.handle), self.axis or 0
        if not bf16 and x.handle.data.dtype != np.float16:
            return total(self, x)
        data = x.handle.data if self.axis is not None else x.handle.data.reshape(-1)
        summed = _added_in_pairs(np.moveaxis(data, axis, 0), *((decode, encode) if bf16 else (np.array, np.array)))
        if self.keep_dims:
            summed = np.expand_dims(summed, axis if self.axis is not None else tuple(range(x.handle.data.ndim)))
        return self.to_tensor(summed if summed.ndim else summed[()], x.dtype)

    def cumsum(self, x):
        if not holds_bf16(x.handle):
            return running(self, x)
        return [self.to_tensor(encode(np.cumsum(decode(x.handle.data), axis=self.axis)), x.dtype)]

    stock.ReduceOps.sum = reduce_sum
    stock.ScanOps.cumsum = cumsum


def _repair_indexing() -> None:
    """Block values as Python indices: numpy 2.4 refuses what Triton 3.6 relies on."""
    patch = stock._patch_lang_tensor
    as_index = lambda self: int(self.handle.data.reshape(-1)[0])  # noqa: E731

    def patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", as_index)
        else:
            tensor.__index__ = as_index

    stock._patch_lang_tensor = patch_lang_tensor
    known, lookup, pointer = {}, stock._get_np_dtype, np.dtype(np.uint64)

    def get_np_dtype(kind):
        if isinstance(kind, tl.pointer_type):
            return pointer
        name = kind.scalar.name
        if name not in known:
            known[name] = lookup(kind)
        return known[name]

    stock._get_np_dtype = get_np_dtype


def _repair_loops() -> None:
    """A counter of `range` has the methods of a scalar where a kernel calls them, as `i_t.to(tl.int64)`."""

    def visit_for(self, node):
        node = self.generic_visit(node)
        counter, ranges = getattr(node.target, "id", ""), getattr(node.iter, "func", None)
        counts = "range" in (getattr(ranges, "id", ""), getattr(ranges, "attr", ""))  # range, tl.range
        owners = (n.value for part in node.body for n in ast.walk(part) if isinstance(n, ast.Attribute))
        if counts and any(getattr(owner, "id", None) == counter for owner in owners):
            node.body[:0] = ast.parse(f"{counter} = interpreter_semantic.to_tensor({counter}, False)").body
        return node

    stock.ASTTransformer.visit_For = visit_for


def _repair_libdevice() -> None:
    from triton.language.extra import libdevice

    def elementwise(function):
        def call(x, *args, **kwargs):
            data = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

        return call

    functions = {
        "exp": np.exp,
        "exp2": np.exp2,
        "expm1": np.expm1,
        "log": np.log,
        "log2": np.log2,
        "log1p": np.log1p,
        "tanh": np.tanh,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "fast_expf": np.exp,
        "fast_logf": np.log,
        "fast_log2f": np.log2,
        "fast_tanhf": np.tanh,
        "abs": np.abs,
        "rint": np.rint,
        "isnan": np.isnan,
    }
    for name, function in functions.items():
        setattr(libdevice, name, elementwise(function))


class _Nothing:
    def restore(self) -> None:
        pass


def _patch_language_once() -> None:
    """Upstream patches triton.language at every launch and every nested jit call, about 100 us each; once is enough.

    It leaves out what a kernel's module holds by name (`from triton.language import gather`); that is replaced there.
    """

    def probe():
        pass

    before = {id(member): name for name, member in vars(tl).items() if tl.core.is_builtin(member)}
    stock._patch_lang(type(probe)(probe.__code__, {"tl": tl, "core": tl.core}))
    nothing, seen = _Nothing(), {}

    def patch_lang(function):
        names = function.__globals__
        if id(names) not in seen:
            seen[id(names)] = names  # kept, so that no other module's are taken for them
            held = {name: before[id(value)] for name, value in names.items() if id(value) in before}
            names.update({name: getattr(tl, original) for name, original in held.items()})
        return nothing

    stock._patch_lang = patch_lang


class _Launcher:
    """A thread that runs launches one at a time, each from the bottom of its stack.

    CPython allocates interpreter frames in chunks and returns a chunk on every call that crosses its border; at the
    stack depth of pytest under Hypothesis the kernel's frames sit on one, and run five times slower.
    """

    def __init__(self):
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.process = self.thread = None

    def start(self) -> None:
        if self.process != os.getpid():  # also after a fork
            worker = threading.Thread(target=self.loop, daemon=True, name="triton-interpreter")
            worker.start()
            self.process, self.thread = os.getpid(), worker.ident

    def loop(self) -> None:
        torch.set_grad_enabled(False)
        np.seterr(all="ignore")  # infinities and NaN are values like others here
        while True:
            function, args, kwargs, answer = self.jobs.get()
            try:
                answer.put((function(*args, **kwargs), None))
            except BaseException as error:
                answer.put((None, error))
            del function, args, kwargs, answer

    def call(self, function, *args, **kwargs):
        if threading.get_ident() == self.thread:
            return function(*args, **kwargs)
        with self.lock:
            self.start()
            answer: queue.SimpleQueue = queue.SimpleQueue()
            self.jobs.put((function, args, kwargs, answer))
            result, error = answer.get()
        if error is not None:
            raise _memory_fault_in(error) or error
        return result


def _memory_fault_in(error: BaseException | None) -> sanitizer.MemoryFault | None:
    """The fault that the interpreter wrapped, once for every jit function it left."""
    while error is not None and not isinstance(error, sanitizer.MemoryFault):
        error = error.__cause__
    return error


def _launch_on_fresh_stacks() -> None:
    launch, launcher = stock.GridExecutor.__call__, _Launcher()
    stock.GridExecutor.__call__ = lambda self, *args, **kwargs: launcher.call(launch, self, *args, **kwargs)
