"""What the interpreter remembers is what the stock code says, for every pair of operands; numpy does the rest."""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

from harness import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
interpreter.install()

KINDS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
NUMBERS = (True, 0, -1, 3, 300, 2**40, 0.0, -0.0, 0.1, -2.5, 1e300, float("inf"))
RULES = {"arithmetic": {}, "pointer": {"allow_lhs_ptr": True, "allow_rhs_ptr": True}, "division": {"div_or_mod": True}}


def operand(kind: tl.dtype, *shape: int) -> tl.tensor:
    data = np.ones(shape or 1, stock._get_np_dtype(kind))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(method, lhs, rhs, rules) -> list[tuple] | tuple:
    """The types, and the values stretched to them, or the error."""
    try:
        both = method(lhs, rhs, **rules)
    except Exception as error:
        return type(error), str(error)
    return [(x.type, np.broadcast_to(x.handle.data, x.type.sizes or (1,)).tobytes(), x.handle.dtype) for x in both]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shapes", [((), ()), ((4,), ()), ((4, 1), (1, 8)), ((2, 8), (8,))], ids=str)
def test_decisions_are_those_of_the_stock_rules(rules, shapes):
    """Asked twice, so that what is remembered is asked too."""
    plain, ours = TritonSemantic(stock.interpreter_builder), stock.interpreter_semantic
    kinds = (*KINDS, tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))
    tensors = [(operand(a, *shapes[0]), operand(b, *shapes[1])) for a, b in itertools.product(kinds, kinds)]
    numbers = [(operand(kind, *shapes[0]), number) for kind, number in itertools.product(kinds, NUMBERS)]
    for lhs, rhs in [*tensors, *numbers, *((b, a) for a, b in numbers)] * 2:
        expected = outcome(plain.binary_op_type_checking_impl, lhs, rhs, rules)
        assert outcome(ours.binary_op_type_checking_impl, lhs, rhs, rules) == expected, (lhs, rhs)


def test_shapes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"4.*8"):
        stock.interpreter_semantic.add(operand(tl.float32, 4), operand(tl.float32, 8), True)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])


def test_types_of_blocks_are_one_object():
    block = tl.block_type(tl.float32, [4, 8])
    assert (
        block
        is tl.block_type(tl.float32, [tl.constexpr(4), 8])
        is tl.block_type(tl.int8, [4, 8]).with_element_ty(tl.float32)
    )
    others = (tl.block_type(tl.float32, [8, 4]), tl.block_type(tl.bfloat16, [4, 8]))
    assert all(other is not block and other != block for other in others)
    assert (block.scalar, list(block.shape), block.numel) == (tl.float32, [4, 8], 32)


@triton.jit
def stretch_kernel(x, y, z, N: tl.constexpr, M: tl.constexpr):
    o_i = tl.arange(0, N)
    o_j = tl.arange(0, M)
    b_x = tl.load(x + o_i)[:, None]
    b_y = tl.load(y + o_j)
    b_z = tl.where(o_i[:, None] > o_j, b_x - 2 * b_y, -5.0)
    tl.store(z + o_i[:, None] * M + o_j, tl.where(b_y > 0, b_z, tl.maximum(b_x, 1.0)))


def test_operands_are_stretched():
    x, y, z = torch.arange(4.0), torch.tensor([1.0, -1.0, 2.0, 0.5, -3.0, 1.0, 1.0, 0.0]), torch.empty(4, 8)
    stretch_kernel[(1,)](x, y, z, 4, 8)
    later = torch.arange(4)[:, None] > torch.arange(8)
    inner = torch.where(later, x[:, None] - 2 * y, torch.tensor(-5.0))
    expected = torch.where(y > 0, inner, torch.maximum(x[:, None], torch.tensor(1.0)).expand(4, 8))
    assert torch.equal(z, expected)


@triton.jit
def wrap_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o) * 2 + 1)


def test_integers_wrap_as_on_hardware():
    x, y = torch.tensor([2**30, -(2**31), 5, -1], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    wrap_kernel[(1,)](x, y, 4)
    assert y.tolist() == [-(2**31) + 1, 1, 11, -1]
