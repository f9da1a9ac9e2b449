"""The repaired interpreter: bf16 to the bit, dots, and each planted memory fault caught with kernel and program named."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from harness import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
interpreter.install()


@triton.jit
def copy_kernel(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < N).to(y.dtype.element_ty), mask=o < N)


@triton.jit
def multiply_add_kernel(x, y, z, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(z + o, tl.load(x + o) * tl.load(y + o) + tl.load(x + o))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o), input_precision="ieee"))


@triton.jit
def reach_kernel(x, y, shift_load, shift_store, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o + shift_store, tl.load(x + o + shift_load))


@triton.jit
def same_place_kernel(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK) // 2, tl.arange(0, BLOCK).to(tl.float32))


@triton.jit
def neighbour_kernel(y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + tl.program_id(0) * BLOCK + o, tl.zeros([BLOCK], tl.float32))
    tl.store(y + o, tl.load(y + o) + 1.0)


@triton.jit
def order_kernel(counter, seen):
    rank = tl.load(counter)
    tl.store(seen + tl.program_id(0), rank)
    tl.store(counter, rank + 1)


def awkward_floats() -> torch.Tensor:
    """Every bf16 value as fp32, the midpoint above it, and both neighbours of that midpoint."""
    bits = torch.arange(65536, dtype=torch.int64) << 16
    middle = bits + 0x8000
    words = torch.cat([bits, middle, middle - 1, middle + 1]) & 0xFFFFFFFF
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.float32))


def run_copy(x, dtype):
    y = torch.empty(x.shape, dtype=dtype)
    copy_kernel[(triton.cdiv(x.numel(), 65536),)](x, y, x.numel(), 65536)
    return y


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    both_nan = torch.isnan(a) & torch.isnan(b)
    same = a.view(torch.int16 if a.element_size() == 2 else torch.int32) == b.view(
        torch.int16 if b.element_size() == 2 else torch.int32
    )
    return bool((same | both_nan).all())


def test_bf16_store_rounds_to_nearest_even():
    x = awkward_floats()
    assert equal_bits(run_copy(x, torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["to_fp32", "to_fp16"])
def test_bf16_load_is_exact(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert equal_bits(run_copy(x, dtype), x.to(dtype))


def test_bf16_arithmetic_rounds_each_operation():
    torch.manual_seed(0)
    x, y = torch.randn(2, 4096).to(torch.bfloat16)
    z = torch.empty_like(x)
    multiply_add_kernel[(1,)](x, y, z, 4096)
    assert equal_bits(z, x * y + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_dot(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).to(dtype)
    c = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, c, 32)
    exact = a.double() @ b.double()
    assert float((c - exact).abs().max()) < 32 * 2.0**-24 * float((a.double().abs() @ b.double().abs()).max())


def test_tf32_operands_are_truncated():
    a = torch.full((16, 16), 1.0 + 2.0**-11)
    c = torch.empty(16, 16)

    @triton.jit
    def tf32_kernel(a, b, c, N: tl.constexpr):
        o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o), input_precision="tf32"))

    with interpreter.tf32_operands():
        tf32_kernel[(1,)](a, a, c, 16)
    assert torch.equal(c, torch.full((16, 16), 16.0))


@pytest.mark.parametrize("shifts, action", [((1, 0), "load"), ((0, 1), "store")], ids=["load", "store"])
def test_out_of_bounds_is_caught(shifts, action):
    x, y = torch.zeros(2, 64).unbind(0)
    x, y = x.clone(), y.clone()
    with interpreter.sanitize(), pytest.raises(interpreter.MemoryFault) as caught:
        reach_kernel[(4,)](x, y, *shifts, 16)
    message = str(caught.value)
    assert f"out-of-bounds {action}: kernel reach_kernel, program (3, 0, 0)" in message
    assert "test_interpreter.py:" in message


def test_uninitialised_read_is_caught_until_written():
    with interpreter.sanitize():
        x, y = torch.empty(64), torch.empty(64)
        with pytest.raises(interpreter.MemoryFault, match=r"uninitialised read: kernel reach_kernel, program \(0, 0, 0\), argument x"):
            reach_kernel[(4,)](x, y, 0, 0, 16)
        x.zero_()
        reach_kernel[(4,)](x, y, 0, 0, 16)
        reach_kernel[(4,)](y, torch.empty(64), 0, 0, 16)


def test_race_is_caught():
    with interpreter.sanitize(), pytest.raises(interpreter.MemoryFault, match=r"race: kernel neighbour_kernel, program \(1, 0, 0\)"):
        neighbour_kernel[(2,)](torch.zeros(32), 16)


def test_double_store_is_caught():
    with interpreter.sanitize(), pytest.raises(interpreter.MemoryFault, match="double store: kernel same_place_kernel"):
        same_place_kernel[(1,)](torch.zeros(16), 16)


def test_clean_kernel_stays_clean_in_any_order():
    x = torch.randn(64)
    for seed in range(3):
        y = torch.empty(64)
        with interpreter.sanitize(), interpreter.shuffle(seed):
            reach_kernel[(4,)](x, y, 0, 0, 16)
        assert torch.equal(x, y)


def test_shuffle_changes_program_order_only_inside():
    def order():
        seen = torch.zeros(16, dtype=torch.int32)
        order_kernel[(16,)](torch.zeros(1, dtype=torch.int32), seen)
        return seen.tolist()

    with interpreter.shuffle(1):
        shuffled = order()
    assert sorted(shuffled) == list(range(16)) != shuffled
    assert order() == list(range(16))


def test_installing_twice_is_harmless():
    interpreter.install()
    test_bf16_arithmetic_rounds_each_operation()
