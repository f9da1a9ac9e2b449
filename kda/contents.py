"""Authority on what only the data of a call shows: shared memory, indices that the host can read, and values if
KDA_VALIDATE=1.
"""

import itertools
import os

import torch
from torch import Tensor

from kda.contract import DIFFERENTIABLE, MAX_DECODE_TOKENS, SAFE_BOUND, Call, DecodeCall, GateCall, refuse

READ_IN_DECODE = (*DIFFERENTIABLE, "slots", "num_accepted_tokens", "cu_seqlens")


def check(call: Call | GateCall) -> None:
    """Refuse a validated call for its data, without waiting for a device unless KDA_VALIDATE=1."""
    if isinstance(call, GateCall):
        _check_gate_values(call)
        return
    _check_offset_contents(call)
    if isinstance(call, DecodeCall):
        _check_pool_memory(call)
        if _readable(call.slots):
            _check_slot_contents(call)
    if _values_wanted():
        _check_values(call)


def _values_wanted() -> bool:
    """KDA_VALIDATE=1 asks for checks that read the data, and so wait for the device."""
    return os.environ.get("KDA_VALIDATE") == "1"


def _readable(indices: Tensor) -> bool:
    """On a GPU indices are read only if that costs no wait; kernels trust none of them in any case."""
    return indices.device.type == "cpu" or _values_wanted()


def _check_offset_contents(call: Call) -> None:
    cu, cpu = call.cu_seqlens, call.cu_seqlens_cpu
    for name, offsets in (("cu_seqlens", cu), ("cu_seqlens_cpu", cpu)):
        if offsets is not None and _readable(offsets):
            check_offset_values(name, offsets.tolist(), call.q.shape[1])
    if cpu is not None and _readable(cu) and cu.tolist() != cpu.tolist():
        refuse("cu_seqlens_cpu", cpu.tolist(), f"a copy of cu_seqlens = {cu.tolist()}")


def check_offset_values(name: str, offsets: list[int], tokens: int) -> None:
    """Refuse offsets `[N + 1]` that do not go from 0 up to at most `tokens`."""
    if offsets[0] != 0:
        refuse(f"{name}[0]", offsets[0], "0")
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            refuse(f"{name}[{i + 1}]", b, f"at least {name}[{i}] = {a}")
    if offsets[-1] > tokens:
        refuse(f"{name}[-1]", offsets[-1], f"at most T = {tokens}")


def _check_slot_contents(call: DecodeCall) -> None:
    """Slots inside the pool, each used once; numbers of tokens and of accepted ones that the table has columns for."""
    most = call.columns if call.slots.dim() == 2 else MAX_DECODE_TOKENS
    lengths = [call.q.shape[1]] * call.sequences if call.cu_seqlens is None else call.cu_seqlens.diff().tolist()
    for n, length in enumerate(lengths):
        if length > most:
            refuse(f"cu_seqlens[{n + 1}] - cu_seqlens[{n}]", length, f"at most {most} new tokens of a sequence")
    seen: dict[int, str] = {}
    for n, row in enumerate(call.slots.reshape(call.sequences, call.columns).tolist()):
        for column, slot in enumerate(row):
            name = f"slots[{n}]" if call.slots.dim() == 1 else f"slots[{n}, {column}]"
            if not -1 <= slot < call.state_pool.shape[0]:
                refuse(name, slot, f"-1 or a slot of state_pool, below {call.state_pool.shape[0]}")
            if slot >= 0 and slot in seen:
                refuse(name, slot, f"another slot than {seen[slot]}, or -1: two states cannot share one")
            seen[slot] = name
    if call.num_accepted_tokens is not None:
        for n, count in enumerate(call.num_accepted_tokens.tolist()):
            if not 1 <= count <= call.columns and bool((call.slots[n] >= 0).any()):
                refuse(f"num_accepted_tokens[{n}]", count, f"in 1..{call.columns}, the columns of slots")


def _end(x: Tensor) -> int:
    """The address behind the last byte of a tensor."""
    if x.is_contiguous():
        return x.data_ptr() + x.numel() * x.element_size()
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride())])
    return x.data_ptr() + (extent * x.element_size() if x.numel() else 0)


def _check_pool_memory(call: DecodeCall) -> None:
    """What is read must not change in the middle of the call; memory between two slots counts as the pool's."""
    if call.state_pool.is_neg():
        refuse("state_pool", "a view that negates its memory", "the memory itself: it is changed in place")
    begin, end = call.state_pool.data_ptr(), _end(call.state_pool)
    arguments = call.__dict__
    for name in READ_IN_DECODE:
        x = arguments[name]
        if x is not None and x.data_ptr() < end and begin < _end(x):
            refuse(name, "in the memory of state_pool", "in memory of its own: the pool changes while it is read")


def _live_tokens(call: Call) -> Tensor:
    """bool `[B, T]`: tokens that belong to a sequence, and in a decode call to one that has a state."""
    B, T = call.q.shape[:2]
    rows = torch.arange(B * T, device=call.q.device)
    sequence = torch.bucketize(rows, call.offsets()[1:], right=True)
    live = torch.ones(call.sequences + 1, dtype=torch.bool, device=call.q.device)
    live[-1] = False
    if isinstance(call, DecodeCall):
        live[:-1] = call.first_slots() >= 0
    return live[sequence].view(B, T)


def _first(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()


def _check_finite(name: str, x: Tensor | None) -> None:
    if x is not None and not bool(torch.isfinite(x).all()):
        at = _first(~torch.isfinite(x))
        refuse(f"{name}{at}", x[tuple(at)].item(), "finite")


def _check_gate_values(call: GateCall) -> None:
    if _values_wanted():
        for name in ("g", "A_log", "dt_bias"):
            _check_finite(name, getattr(call, name))


def _check_values(call: Call) -> None:
    """What only reading the data can show; tokens and states of no sequence hold anything, and are not read."""
    live = _live_tokens(call)
    of_sequences = lambda x: x.masked_fill(~live.view(*live.shape, *[1] * (x.dim() - 2)), 0)  # noqa: E731
    for name in ("q", "k", "v", "beta"):
        _check_finite(name, of_sequences(getattr(call, name)))
    for name in ("A_log", "dt_bias", "initial_state"):
        _check_finite(name, getattr(call, name))
    if isinstance(call, DecodeCall):
        idle = torch.ones(call.state_pool.shape[0], dtype=torch.bool, device=call.q.device)
        begun = call.first_slots()
        idle[begun[begun >= 0]] = False
        _check_finite("state_pool", call.state_pool.masked_fill(idle.view(-1, 1, 1, 1), 0))
    g = of_sequences(call.g)
    if call.use_gate_in_kernel:
        _check_finite("g", g)
        return
    wrong, must = ~(g <= 0), "a log decay <= 0"
    if call.safe_gate:
        wrong, must = ~((g <= 0) & (g >= SAFE_BOUND)), f"in [{SAFE_BOUND:g}, 0] when safe_gate is True"
    if bool(wrong.any()):
        at = _first(wrong)
        refuse(f"g{at}", g[tuple(at)].item(), must)
