"""The interpreter's sanitizer: planted memory faults are caught and named; clean kernels stay clean."""

import inspect
import re
from collections import namedtuple

import pytest
import torch
import triton
import triton.language as tl
from torch import library

import kda
from harness import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")


@triton.jit
def copy_kernel(x, y, shift_load, shift_store, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o + shift_store, tl.load(x + o + shift_load))


@triton.jit
def halves_kernel(x, y, N: tl.constexpr):
    """The lower half of x, masked."""
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o, mask=o < N // 2, other=0.0))


@triton.jit
def pair_kernel(pair, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(pair[1] + o, tl.load(pair[0] + o))


@triton.jit
def store_twice_kernel(y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK) // 2, tl.arange(0, BLOCK).to(tl.float32))


@triton.jit
def read_written_kernel(y, z):
    """Every program stores its element and reads that of program 0."""
    tl.store(y + tl.program_id(0), 1.0)
    tl.store(z + tl.program_id(0), tl.load(y))


@triton.jit
def write_read_kernel(x, y):
    """Every program reads x[0]; the last one then overwrites it."""
    value = tl.load(x)
    tl.store(y + tl.program_id(0), value)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(x, value + 1)


@triton.jit
def write_same_kernel(y):
    tl.store(y, 1.0)


@triton.jit
def half_overlap_kernel(y, z):
    """Program 0 stores 4 bytes, program 1 the upper 2 of them."""
    if tl.program_id(0) == 0:
        tl.store(y, 1.0)
    else:
        tl.store(z + 1, tl.full([], 1.0, tl.float16))


@triton.jit
def count_kernel(counter, PLAIN: tl.constexpr):
    tl.atomic_add(counter, 1)
    if PLAIN and tl.program_id(0) == 1:
        tl.store(counter, 0)


@triton.jit
def swap_kernel(lock, shift):
    tl.atomic_cas(lock + shift, 0, 1)


@triton.jit
def load_helper(x, o):
    return tl.load(x + o)


@triton.jit
def nested_kernel(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, load_helper(x, o + 1))


def caught(launch) -> str:
    with pytest.raises(interpreter.MemoryFault) as fault:
        launch()
    return str(fault.value)


def line_of(kernel, text: str) -> str:
    lines, first = inspect.getsourcelines(kernel.fn)
    return f"test_sanitizer.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    "shifts, program, argument, place",
    [
        ((1, 0), 3, "x", "load: .* 1 of 16 lanes, the first at byte 256 of 256"),
        ((0, 1), 3, "y", "store: .* 1 of 16 lanes, the first at byte 256 of 256"),
        ((-2, 0), 0, "x", "load: .* 2 of 16 lanes, the first at byte -8 of 256"),
        ((0, -1), 0, "y", "store: .* 1 of 16 lanes, the first at byte -4 of 256"),
    ],
    ids=["load_after", "store_after", "load_before", "store_before"],
)
def test_out_of_bounds(shifts, program, argument, place):
    x, y = torch.zeros(192)[64:128], torch.zeros(192)[64:128]  # memory of the storage, but not of the argument
    with interpreter.sanitize():
        message = caught(lambda: copy_kernel[(4,)](x, y, *shifts, 16))
    line = line_of(copy_kernel, "tl.load")
    assert f"kernel copy_kernel, program ({program}, 0, 0), argument {argument}, {line}" in message
    assert re.match(f"out-of-bounds {place}", message)


def test_out_of_bounds_of_a_compare_and_swap():
    with interpreter.sanitize():
        message = caught(lambda: swap_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 1))
    assert message.startswith("out-of-bounds update: kernel swap_kernel, program (0, 0, 0), argument lock")


def test_fault_in_a_nested_jit_function_names_its_line():
    with interpreter.sanitize():
        message = caught(lambda: nested_kernel[(1,)](torch.zeros(16), torch.zeros(16), 16))
    assert f"kernel nested_kernel, program (0, 0, 0), argument x, {line_of(load_helper, 'tl.load')}" in message


def test_masked_lanes_touch_nothing():
    with interpreter.sanitize():
        y = torch.empty(16)
        halves_kernel[(1,)](torch.ones(8), y, 16)
    assert y.tolist() == [1.0] * 8 + [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
def test_uninitialised_read_until_written(dtype):
    size = torch.tensor([], dtype=dtype).element_size()
    with interpreter.sanitize():
        x, y = torch.empty(64, dtype=dtype), torch.empty(64, dtype=dtype)
        x[: 16 * 3 - 2] = 1
        copy = lambda: copy_kernel[(4,)](x, y, 0, 0, 16)  # noqa: E731
        message = caught(copy)
        assert message.startswith("uninitialised read: kernel copy_kernel, program (2, 0, 0), argument x, test_")
        assert message.endswith(f"{2 * size} of {16 * size} bytes were never written")
        x[16 * 3 - 2 :] = 2
        copy()
        copy_kernel[(4,)](y, torch.empty(64, dtype=dtype), 0, 0, 16)  # a kernel wrote y


WRITES = {
    "out": lambda x: torch.add(torch.ones(64), 1, out=x),
    "foreach": lambda x: torch._foreach_zero_([x]),
    "strided_view": lambda x: (x.view(2, 32).t()[::2].fill_(1), x.view(2, 32)[:, 1::2].fill_(2)),
    "parameter": lambda x: torch.nn.init.zeros_(torch.nn.Parameter(x)),
    "none": lambda x: x.unsqueeze_(0).squeeze_(0),
    "rest_missing": lambda x: x.view(2, 32)[:, 1::2].fill_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_which_operations_write(write):
    with interpreter.sanitize():
        x = torch.empty(64)
        WRITES[write](x)
        copy = lambda: copy_kernel[(4,)](x, torch.empty(64), 0, 0, 16)  # noqa: E731
        if write in ("none", "rest_missing"):
            assert "uninitialised read" in caught(copy)
        else:
            copy()


@library.custom_op("test_sanitizer::copy_of_nothing", mutates_args=())
def copy_of_nothing(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(4,)](torch.empty_like(x), y, 0, 0, 16)
    return y


class CopyOfNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return copy_of_nothing(dy)


@pytest.mark.parametrize("place", ["custom_op", "backward"])
def test_uninitialised_read_within(place):
    x = torch.ones(64, requires_grad=True)
    with interpreter.sanitize():
        message = caught(
            lambda: copy_of_nothing(x) if place == "custom_op" else CopyOfNothing.apply(x).sum().backward()
        )
    assert "uninitialised read: kernel copy_kernel, program (0, 0, 0), argument x" in message


def test_freed_memory_is_forgotten():
    with interpreter.sanitize():
        for value in range(20):
            torch.empty(64)
            x = torch.tensor([float(value)] * 64)  # may lie where the empty tensor lay
            copy_kernel[(4,)](x, torch.empty(64), 0, 0, 16)


def test_tensors_in_tuples_are_arguments():
    Pair = namedtuple("Pair", "x y")
    with interpreter.sanitize():
        pair_kernel[(1,)](Pair(torch.ones(16), torch.ones(16)), 16)
        assert "out-of-bounds store: kernel pair_kernel, program (0, 0, 0), argument pair[1]" in caught(
            lambda: pair_kernel[(1,)](Pair(torch.ones(16), torch.ones(8)), 16)
        )


RACES = {
    "read_after_write": (
        lambda: read_written_kernel[(2,)](torch.zeros(2), torch.zeros(2)),
        ("read_written_kernel", "1, 0, 0", r"load of memory that program \(0, 0, 0\) stored"),
    ),
    "write_after_read": (
        lambda: write_read_kernel[(2,)](torch.zeros(2), torch.zeros(2)),
        ("write_read_kernel", "1, 0, 0", r"store of memory that other programs loaded"),
    ),
    "write_after_write": (
        lambda: write_same_kernel[(1, 2)](torch.zeros(1)),
        ("write_same_kernel", "0, 1, 0", r"store of memory that program \(0, 0, 0\) stored"),
    ),
    "part_of_an_element": (
        lambda: half_overlap_kernel[(2,)](*(lambda y: (y, y.view(torch.float16)))(torch.zeros(1))),
        ("half_overlap_kernel", "1, 0, 0", r"store of memory that program \(0, 0, 0\) stored"),
    ),
    "plain_among_atomics": (
        lambda: count_kernel[(2,)](torch.zeros(1, dtype=torch.int32), True),
        ("count_kernel", "1, 0, 0", r"store of memory that other programs updated"),
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_race(race):
    launch, expected = RACES[race]
    with interpreter.sanitize():
        kernel, program, action = expected
        message = caught(launch)
    assert re.fullmatch(
        rf"race: kernel {kernel}, program \({program}\), argument \w+, .*: {action} in this launch", message
    )
    launch()  # nothing is looked at outside


@pytest.mark.parametrize("seed", range(4))
def test_race_is_caught_in_every_order(seed):
    with interpreter.sanitize(), interpreter.shuffle(seed):
        assert "race" in caught(lambda: read_written_kernel[(4,)](torch.zeros(4), torch.zeros(4)))


def test_double_store():
    with interpreter.sanitize():
        message = caught(lambda: store_twice_kernel[(1,)](torch.zeros(16), 16))
    assert message.startswith("double store: kernel store_twice_kernel, program (0, 0, 0), argument y, test_")


def test_atomics_do_not_race():
    counter = torch.zeros(1, dtype=torch.int32)
    with interpreter.sanitize():
        count_kernel[(5,)](counter, False)
    assert counter.item() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool], ids=["fp32", "int8", "bool"])
def test_neighbouring_bytes_of_programs_are_no_race(dtype):
    x = torch.arange(4).to(dtype)
    with interpreter.sanitize():
        y = torch.empty_like(x)
        copy_kernel[(4,)](x, y, 0, 0, 1)
    assert torch.equal(x, y)


@pytest.mark.parametrize("seed", range(2))
def test_our_kernels_are_clean_in_any_order(seed):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 7, 1, 5, dtype=torch.bfloat16)
    v, g = torch.randn(1, 7, 2, 6, dtype=torch.bfloat16), torch.randn(1, 7, 2, 5)
    x = [t.requires_grad_() for t in (q, k, v, g, torch.rand(1, 7, 2, dtype=torch.bfloat16))]
    options = dict(A_log=torch.zeros(2), dt_bias=torch.zeros(10), use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)

    def run():
        cu_seqlens = torch.tensor([0, 3, 3, 6])
        o, state = kda.fused_recurrent_kda(*x, cu_seqlens=cu_seqlens, output_final_state=True, **options)
        return (o, state, *torch.autograd.grad((o.float().sum() + state.sum()), x))

    with kda.record_launches() as launches:
        plain = run()
    assert {launch.route for launch in launches} >= {"recurrent"}
    with interpreter.sanitize(), interpreter.shuffle(seed):
        assert all(map(torch.equal, plain, run()))


def test_sanitizers_nest():
    with interpreter.sanitize():
        with interpreter.sanitize():
            x = torch.ones(64)
        assert "out-of-bounds" in caught(lambda: copy_kernel[(4,)](x, torch.ones(64), 1, 0, 16))
