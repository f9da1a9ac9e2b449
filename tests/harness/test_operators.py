"""Operators and functions that the interpreter takes at once give what the stock code gives: types, bits and errors."""

import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

from harness import interpreter
from harness.interpreter import functions, operators

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning"),
]
interpreter.install()

FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64)
KINDS = (tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64, *FLOATS)
POINTERS = (tl.pointer_type(tl.float32), tl.pointer_type(tl.int1), tl.pointer_type(tl.pointer_type(tl.int8)))
PLAIN_NUMBERS = (True, False, 0, 1, -1, 3, 300, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63, 2**70)
FLOAT_NUMBERS = (0.0, -0.0, 0.1, -2.5, 1e-40, 1e300, math.inf, -math.inf, math.nan)
NUMBERS = (*PLAIN_NUMBERS, *FLOAT_NUMBERS, tl.constexpr(7), tl.constexpr(-0.0), tl.constexpr(True), None, "a")
SHAPES = (((), ()), ((8,), ()), ((), (8,)), ((4, 1), (1, 8)), ((2, 8), (8,)), ((4, 8), (4, 8)))
FLOAT_VALUES = (1.5, 0.1, -0.0, math.nan, math.inf, -3.25, 0.0, 1e-40, -math.inf, 7.0, 2.0**127)
WHOLE_VALUES = (3, -1, 0, 2**63 - 1, -(2**63), 2**31 - 1, -(2**31), 5, -7, 1, 2)


def tensor(kind: tl.dtype, shape: tuple[int, ...], shift: int = 0) -> tl.tensor:
    """Special values of a kind, in an order that `shift` turns; whole numbers wrap to it."""
    held, count = stock._get_np_dtype(kind), math.prod(shape)
    values = FLOAT_VALUES if kind in FLOATS else WHOLE_VALUES
    chosen = np.array([values[(i + shift) % len(values)] for i in range(count)])
    if kind is tl.bfloat16:
        data = torch.from_numpy(chosen).bfloat16().view(torch.int16).numpy().view(np.uint16)
    else:
        data = chosen.astype(held)
    data = data.reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(call, *operands) -> tuple:
    """Types, values stretched to them and what numpy holds them in; or the error."""
    try:
        x = call(*operands)
        if not isinstance(x, tl.tensor):
            return type(x), repr(x)
        data = x.handle.data
        values = np.broadcast_to(data, x.type.sizes or (1,)).tobytes()
    except Exception as error:
        return type(error), str(error)
    return x.type, x.dtype, x.handle.dtype, [n.value for n in x.shape], x.numel.value, data.dtype, values


def check(call, monkeypatch, cases) -> None:
    """Each case twice, as what is remembered is asked too, beside the stock code with its own rules."""
    for operands in cases:
        with monkeypatch.context() as patched:
            patched.setattr(stock.interpreter_semantic, "__class__", TritonSemantic)
            expected = outcome(call.__wrapped__, *operands)
        for _ in range(2):
            assert outcome(call, *operands) == expected, operands


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", operators.METHODS)
def test_operators_of_tensors(name, shapes, monkeypatch):
    pairs = itertools.product((*KINDS, *POINTERS), repeat=2)
    cases = [(tensor(a, shapes[0]), tensor(b, shapes[1], 3)) for a, b in pairs]
    check(getattr(tl.tensor, name), monkeypatch, cases)


@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
@pytest.mark.parametrize("name", operators.METHODS)
def test_operators_of_a_tensor_and_a_number(name, shape, monkeypatch):
    kinds = itertools.product((*KINDS, *POINTERS), NUMBERS)
    check(getattr(tl.tensor, name), monkeypatch, [(tensor(kind, shape), number) for kind, number in kinds])


@pytest.mark.parametrize("name", ["__add__", "__mul__", "__and__", "__lt__"])
def test_what_is_held_as_another_type_goes_the_long_way(name, monkeypatch):
    """Truth in whole numbers: some versions let its arithmetic wrap, numpy's does not."""
    held = TensorHandle(np.array([True, False, True, True]), tl.int32)
    x = tl.tensor(held, tl.block_type(tl.int32, [4]))
    check(getattr(tl.tensor, name), monkeypatch, [(x, x), (x, tensor(tl.int32, (4,))), (x, 3)])


@pytest.mark.parametrize("shape", [(), (4, 8)], ids=str)
def test_where(shape, monkeypatch):
    conditions = [tensor(tl.int1, size) for size in ((), (4, 1), (4, 8))]
    tensors = [tensor(kind, shape, 2) for kind in KINDS]
    both = [*itertools.product(tensors, tensors), *itertools.product(tensors, NUMBERS)]
    both += [(y, x) for x, y in itertools.product(tensors, NUMBERS)]
    check(tl.where, monkeypatch, [(condition, x, y) for condition in conditions for x, y in both])


@pytest.mark.parametrize("how", [{}, {"bitcast": True}, {"fp_downcast_rounding": "rtz"}], ids=str)
def test_conversions(how, monkeypatch):
    to = tl.tensor.to

    def convert(x, kind):
        return to(x, kind, **how)

    convert.__wrapped__ = lambda x, kind: to.__wrapped__(x, kind, **how)
    kinds = (*KINDS, *POINTERS, tl.constexpr(tl.float32))
    cases = [(tensor(a, shape), b) for a in (*KINDS, *POINTERS) for b in kinds for shape in ((), (4, 8))]
    check(convert, monkeypatch, cases)


def test_new_axes(monkeypatch):
    full = slice(None)
    slices = [
        (full, None),
        (None, full),
        (None, full, None),
        (full, full),
        (full, None, full),
        None,
        full,
        (0, None),
        (),
    ]
    cases = [
        (tensor(kind, shape), at) for kind in (tl.int1, tl.float32) for shape in ((), (8,), (2, 4)) for at in slices
    ]
    check(tl.tensor.__getitem__, monkeypatch, cases)


@pytest.mark.parametrize("name", operators.METHODS)
def test_shapes_that_do_not_go_together_are_refused(name):
    """With the words of the operands' own rules, which are numpy's."""
    call, x, y = getattr(tl.tensor, name), tensor(tl.int32, (4,)), tensor(tl.int32, (8,))
    assert outcome(call, x, y) == outcome(call.__wrapped__, x, y)
    assert outcome(call, x, y)[0] is ValueError


def memory(kind: tl.dtype, values: np.ndarray, shape: tuple[int, ...]) -> tl.tensor:
    """Pointers to the first elements of an array."""
    count = math.prod(shape)
    places = values.ctypes.data + values.itemsize * np.arange(count, dtype=np.uint64).reshape(shape or (1,))
    pointer = tl.pointer_type(kind)
    return tl.tensor(TensorHandle(places, pointer), tl.block_type(pointer, list(shape)) if shape else pointer)


@pytest.mark.parametrize("kind", [tl.int1, tl.bfloat16, tl.float32, tl.int64], ids=str)
def test_loads(kind, monkeypatch):
    values = np.ascontiguousarray(tensor(kind, (4, 8)).handle.data)
    cases = []
    for shape in ((), (8,), (4, 8)):
        pointers = memory(kind, values, shape)
        masks = [None, True, tensor(tl.int1, shape, 2), tensor(tl.int1, shape and (8,)), tensor(tl.int32, shape)]
        others = [None, *NUMBERS, tensor(tl.float32, shape), tensor(tl.int1, ())]
        cases += [(pointers, mask, other) for mask in masks for other in others]
    cases += [(tensor(tl.int64, ()), None, None), (memory(kind, values, ()), tensor(tl.int1, (8,)), None)]
    check(tl.load, monkeypatch, cases)


@pytest.mark.parametrize("kind", [tl.int1, tl.bfloat16, tl.float32, tl.int64], ids=str)
def test_stores(kind, monkeypatch):
    """What is stored is what the call gives here: the memory after it."""
    memory_of = np.zeros((4, 8), stock._get_np_dtype(kind))

    def storing(by):
        def call(pointer, value, mask):
            memory_of[:] = 0
            done = by(pointer, value, mask)
            return done.type, memory_of.tobytes()

        return call

    call = storing(tl.store)
    call.__wrapped__ = storing(tl.store.__wrapped__)
    cases = []
    for shape in ((), (8,), (4, 8)):
        masks = [None, True, tensor(tl.int1, shape), tensor(tl.int1, ()), tensor(tl.int32, shape)]
        values = [tensor(other, size, 1) for other in KINDS for size in (shape, (), (4, 8))]
        pointers = memory(kind, memory_of, shape)
        cases += [(pointers, value, mask) for value in (*values, 2.5, tl.constexpr(3)) for mask in masks]
    check(call, monkeypatch, cases)


@pytest.mark.parametrize("precision", [None, "ieee", "tf32", "bf16x3", "no such", tl.constexpr("ieee")], ids=str)
def test_products(precision, monkeypatch):
    shapes = [((4, 8), (8, 2)), ((2, 4, 8), (2, 8, 4)), ((4, 8), (4, 8)), ((8,), (8,)), ((), ())]
    accumulators = [None, tensor(tl.float32, (4, 2)), tensor(tl.float16, (4, 2)), tensor(tl.float32, (2, 4, 4))]
    cases = []
    for a, b in (
        (tl.float32, tl.float32),
        (tl.bfloat16, tl.bfloat16),
        (tl.float16, tl.float16),
        (tl.float32, tl.float16),
    ):
        pairs = [(tensor(a, left), tensor(b, right, 1)) for left, right in shapes]
        cases += [(x, y, acc, precision) for x, y in pairs for acc in accumulators]
    check(tl.dot, monkeypatch, cases)


def test_what_is_taken_at_once_never_asks_the_stock_code():
    """Or none of the other tests looks at it."""

    def asked(*operands, **options):
        raise AssertionError(operands)

    block, other = tensor(tl.float32, (4, 8)), tensor(tl.float32, (4, 1))
    calls = [(operators.METHODS[name], (block, y)) for name in ("__add__", "__rsub__", "__lt__") for y in (2, -0.0)]
    calls += [(operators.METHODS["__mul__"], (block, other))]
    calls += [
        (functions.METHODS["to"], (block, tl.bfloat16)),
        (functions.METHODS["__getitem__"], (other, (slice(None), None, slice(None)))),
    ]
    calls += [(functions.FUNCTIONS["where"], (block < 1, block, 0.0))]
    pointers = memory(tl.float32, block.handle.data, (4, 8))
    calls += [
        (functions.FUNCTIONS["load"], (pointers, block < 1, 0.0)),
        (functions.FUNCTIONS["store"], (pointers, block)),
    ]
    for plain, operands in calls:
        plain(asked)(*operands)
