"""The repaired interpreter: bf16 to the bit, what else stock gets wrong, and the order of programs."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from harness import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
interpreter.install()

BF16 = torch.bfloat16


@triton.jit
def copy_kernel(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < N).to(y.dtype.element_ty), mask=o < N)


@triton.jit
def truncate_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def arithmetic_kernel(x, y, z, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    a, b = tl.load(x + o), tl.load(y + o)
    if OP == "multiply_add":
        c = a * b + a
    elif OP == "divide":
        c = (a / b).to(tl.bfloat16)
    elif OP == "negate":
        c = -a
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "where_less":
        c = tl.where(a < b, a, b)
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "scalar":
        c = a * 0.1
    elif OP == "clamp":
        c = tl.clamp(a, tl.full([N], -0.5, tl.bfloat16), tl.full([N], 0.5, tl.bfloat16))
    tl.store(z + o, c)


@triton.jit
def fma_kernel(x, y, z, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(z + o, tl.fma(tl.load(x + o), tl.load(y + o), tl.load(z + o)))


@triton.jit
def dot_kernel(a, b, c, PRECISION: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o), acc=tl.load(c + o), input_precision=PRECISION))


@triton.jit
def reduce_kernel(x, y, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o)
    if OP == "sum":
        tl.store(y, tl.sum(a, 0))
    elif OP == "max":
        tl.store(y, tl.max(a, 0).to(y.dtype.element_ty))
    elif OP == "cumsum":
        tl.store(y + o, tl.cumsum(a, 0))
    elif OP == "reverse_cumsum":
        tl.store(y + o, tl.cumsum(a, 0, reverse=True))


@triton.jit
def atomic_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.atomic_add(y + o // 2, tl.load(x + o), mask=o < N - 1)


@triton.jit
def libdevice_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o)
    tl.store(y + o, libdevice.expm1(a) + libdevice.log1p(a) + libdevice.tanh(a) * libdevice.rsqrt(a))


@triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["N"])
@triton.jit
def tuned_kernel(y, N, BLOCK: tl.constexpr):
    tl.store(y + tl.program_id(0), BLOCK)


@triton.jit
def order_kernel(counter, seen):
    """The rank of each program."""
    rank = tl.load(counter)
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(seen + place, rank)
    tl.store(counter, rank + 1)


def awkward_floats() -> torch.Tensor:
    """Every bf16 value as fp32, the midpoint above it, and both neighbours of that midpoint."""
    bits = torch.arange(65536, dtype=torch.int64) << 16
    middle = bits + 0x8000
    words = torch.cat([bits, middle, middle - 1, middle + 1]) & 0xFFFFFFFF
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.float32))


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)


def pairs_of_bf16() -> tuple[torch.Tensor, torch.Tensor]:
    """Random bit patterns: every exponent, subnormals, infinities and NaN among them."""
    bits = torch.randint(-(2**15), 2**15, (2, 2**16), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    x, y = bits.view(BF16)
    return torch.where(x == 0, torch.ones_like(x), x), y.contiguous()  # Triton 3.6 negates as 0 - x, 3.9 flips the sign


def run_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    copy_kernel[(triton.cdiv(x.numel(), 65536),)](x, y, x.numel(), 65536)
    return y


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, NaN with any payload aside."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = got.view(integer) != expected.view(integer)
    if got.is_floating_point():
        different &= ~(torch.isnan(got) & torch.isnan(expected))
    where = different.nonzero()[:3].tolist()
    assert not where, (where, got[different][:3], expected[different][:3])


@triton.jit
def counting_kernel(y, N):
    for i in range(N):
        tl.store(y + i.to(tl.int64), i.to(tl.float32))
    for i in tl.range(N, 2 * N):
        tl.store(y + i.to(tl.int64), i.to(tl.float32))


def test_bf16_store_rounds_to_nearest_even():
    x = awkward_floats()
    assert_same_bits(run_copy(x, BF16), x.to(BF16))


def test_bf16_store_truncates_when_told():
    x = awkward_floats()
    y = torch.empty(x.shape, dtype=BF16)
    truncate_kernel[(1,)](x, y, x.numel())
    bits = (x.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    assert_same_bits(y, torch.where(torch.isnan(x), torch.full_like(bits, torch.nan), bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_bf16_load(dtype):
    x = every_bf16()
    assert_same_bits(run_copy(x, dtype), x.to(dtype))


def test_fp16_store_rounds_to_nearest_even():
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    halves = halves[torch.isfinite(halves)]
    step = torch.nextafter(halves.half(), torch.tensor(torch.inf, dtype=torch.float16)).float()
    x = torch.cat([halves, (halves + step) / 2, torch.nextafter((halves + step) / 2, halves)])
    assert_same_bits(run_copy(x, torch.float16), x.half())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool], ids=str)
def test_bf16_and_integers(dtype):
    whole = torch.arange(-120, 120).to(dtype)
    assert_same_bits(run_copy(whole, BF16), whole.to(BF16))
    assert torch.equal(run_copy(whole.to(BF16), dtype), whole)


@pytest.mark.parametrize(
    "op, expected",
    [
        ("multiply_add", lambda x, y: x * y + x),
        ("divide", lambda x, y: (x.float() / y.float()).to(BF16)),
        ("negate", lambda x, y: -x),
        ("where_less", lambda x, y: torch.where(x < y, x, y)),
        ("abs", lambda x, y: x.abs()),
        ("scalar", lambda x, y: x * torch.tensor(0.1, dtype=BF16)),
    ],
)
def test_bf16_arithmetic_on_any_bits(op, expected):
    x, y = pairs_of_bf16()
    z = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, z, op, x.numel())
    assert_same_bits(z, expected(x, y))


@pytest.mark.parametrize(
    "op, expected",
    [("maximum", torch.maximum), ("clamp", lambda x, y: x.clamp(-0.5, 0.5))],
)
def test_bf16_comparisons_of_numbers(op, expected):
    x, y = (t[~(torch.isnan(a) | torch.isnan(b))][: 2**15] for a, b in [pairs_of_bf16()] for t in (a, b))
    z = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, z, op, x.numel())
    assert torch.equal(z, expected(x, y))


def test_bf16_midpoints_of_sums_go_to_even():
    """1 + 2^-8 lies between 1 and 1 + 2^-7; 1 + 3 2^-8 between that and 1 + 2^-6."""
    x = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=BF16)
    y = torch.tensor([2.0**-8, 3 * 2.0**-8, -(2.0**-8), 2.0**-8 + 2.0**-14], dtype=BF16)
    z = torch.empty_like(x)
    one = torch.ones_like(x)
    fma_kernel[(1,)](one, x, y, 4)
    assert y.tolist() == [1.0, 1 + 2.0**-6, -1.0, 1 + 2.0**-7]
    arithmetic_kernel[(1,)](y, x, z, "multiply_add", 4)
    assert_same_bits(z, y * x + y)


def test_fma_rounds_once():
    x = torch.tensor([1 + 2.0**-12])
    z = -(x * x)
    fma_kernel[(1,)](x, x, z, 1)
    assert z.item() == 2.0**-24


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_dot(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).to(dtype)
    c = torch.ones(32, 32)
    dot_kernel[(1,)](a, b, c, "ieee", 32)
    exact = a.double() @ b.double() + 1
    assert float((c - exact).abs().max()) < 32 * 2.0**-24 * float((a.double().abs() @ b.double().abs()).max())


def test_tf32_operands_are_truncated_where_allowed():
    a = torch.full((16, 16), 1.0 + 2.0**-11)
    results = {}
    for precision in ("tf32", "ieee"):
        c = torch.zeros(16, 16)
        with interpreter.tf32_operands():
            dot_kernel[(1,)](a, a, c, precision, 16)
        results[precision] = c
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, a, c, "tf32", 16)
    assert torch.equal(results["tf32"], torch.full((16, 16), 16.0))
    assert torch.equal(results["ieee"], a @ a) and torch.equal(c, a @ a)


@pytest.mark.parametrize("op", ["sum", "max", "cumsum", "reverse_cumsum"])
def test_bf16_reductions(op):
    """Small integers of both signs: every partial sum is exact, and the largest is not that of the bits."""
    x = torch.tensor([3, -7, 2, -1, 5, -8, 4, 1], dtype=BF16)
    y = torch.zeros(8, dtype=BF16)
    reduce_kernel[(1,)](x, y, op, 8)
    expected = {
        "sum": x.sum()[None],
        "max": x.max()[None],
        "cumsum": x.cumsum(0),
        "reverse_cumsum": x.flip(0).cumsum(0).flip(0),
    }[op]
    assert torch.equal(y[: len(expected)], expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_sums_of_narrow_numbers_are_rounded_at_every_step(dtype):
    """1 beside numbers of half a step each, which all vanish beside it and only two by two do not."""
    half = torch.finfo(dtype).eps / 2
    x = torch.tensor([1.0, half, 1.0, half, 1.0, half, 1.0, half], dtype=dtype)
    y = torch.zeros(1, dtype=dtype)
    reduce_kernel[(1,)](x, y, "sum", 8)
    assert y.item() == 4.0 and x.double().sum().item() > 4.0 + half
    reduce_kernel[(1,)](torch.tensor([1.0, 0.0, half, half, 0.0, 0.0, 0.0, 0.0], dtype=dtype), y, "sum", 8)
    assert y.item() == 1.0 + 2 * half


def test_bf16_atomic_addition():
    x = torch.tensor([1.5, 2.5, -3.0, 1.0, 0.25, 8.0], dtype=BF16)
    x = torch.cat([x, x[:2]])
    y = torch.ones(4, dtype=BF16)
    atomic_kernel[(1,)](x, y, 8)
    assert y.tolist() == [5.0, -1.0, 9.25, 2.5]


def test_libdevice():
    x = torch.linspace(0.1, 2.0, 16)
    y = torch.empty(16)
    libdevice_kernel[(1,)](x, y, 16)
    torch.testing.assert_close(y, torch.expm1(x) + torch.log1p(x) + torch.tanh(x) * torch.rsqrt(x))


def test_autotuned_kernels_take_the_first_configuration():
    y = torch.zeros(4, dtype=torch.int32)
    tuned_kernel[(4,)](y, 4)
    assert y.tolist() == [8] * 4


def program_order(grid: tuple[int, ...]) -> list[int]:
    seen = torch.zeros(int(np.prod(grid)), dtype=torch.int32)
    order_kernel[grid](torch.zeros(1, dtype=torch.int32), seen)
    return seen.tolist()


def test_functions_of_the_language_held_by_name(tmp_path):
    """A kernel's module may have imported them before the interpreter is repaired."""
    script = """
import torch, triton, triton.language as tl
from triton.language import where
from harness import interpreter

@triton.jit
def kernel(y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, where(o < 2, 1.0, -1.0))

interpreter.install()
y = torch.zeros(4)
kernel[(1,)](y, N=4)
assert y.tolist() == [1, 1, -1, -1]
"""
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(tmp_path / "script.py")], env=environment, check=True)


def test_loop_counters_have_methods():
    y = torch.zeros(6)
    counting_kernel[(1,)](y, 3)
    assert y.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("grid", [(16,), (4, 4), (2, 2, 4)], ids=str)
def test_shuffle_changes_program_order_only_inside(grid):
    natural = list(range(16))
    assert program_order(grid) == natural
    with interpreter.shuffle(1):
        first, second = program_order(grid), program_order(grid)
    with interpreter.shuffle(1):
        again = program_order(grid)
    assert sorted(first) == natural != first != second and again == first
    assert program_order(grid) == natural


def test_shuffle_mixes_all_axes():
    """Programs of one row of the grid do not stay together."""
    with interpreter.shuffle(0):
        rows = np.argsort(program_order((4, 8))) // 8
    assert (np.diff(rows) != 0).sum() > 4


def test_shuffle_ends_with_an_exception():
    with pytest.raises(KeyError), interpreter.shuffle(1):
        raise KeyError
    assert program_order((16,)) == list(range(16))


@pytest.mark.parametrize("seed", range(3))
def test_correct_kernels_do_not_see_the_order(seed):
    x = torch.randn(512)
    y = torch.empty(512)
    with interpreter.shuffle(seed):
        copy_kernel[(64,)](x, y, 512, 8)
    assert torch.equal(x, y)


def test_installing_twice_is_harmless():
    before = dict(vars(triton.runtime.interpreter.InterpreterBuilder))
    interpreter.install()
    assert dict(vars(triton.runtime.interpreter.InterpreterBuilder)) == before


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["compiled", "interpreted"])
def test_nothing_is_replaced_at_import_nor_where_kernels_are_compiled(interpret):
    script = """
import triton.language as tl, triton.runtime.interpreter as stock
from triton.language.extra import libdevice
state = lambda: [dict(vars(x)) for x in (stock.InterpreterBuilder, stock.GridExecutor, libdevice, tl)]
before = state()
import os
from harness import interpreter
assert state() == before
interpreter.install()
assert (state() != before) == (os.environ["TRITON_INTERPRET"] == "1")
"""
    subprocess.run([sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": interpret}, check=True)
