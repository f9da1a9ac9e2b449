"""Authority on what only the data of a call shows: offsets that the host can read, and values if KDA_VALIDATE=1."""

import itertools
import os

import torch
from torch import Tensor

from kda.contract import SAFE_BOUND, Call, GateCall, refuse


def check(call: Call | GateCall) -> None:
    """Refuse a validated call for its data, without waiting for a device unless KDA_VALIDATE=1."""
    if isinstance(call, GateCall):
        _check_gate_values(call)
        return
    _check_offset_contents(call)
    if _values_wanted():
        _check_values(call)


def _values_wanted() -> bool:
    """KDA_VALIDATE=1 asks for checks that read the data, and so wait for the device."""
    return os.environ.get("KDA_VALIDATE") == "1"


def _check_offset_contents(call: Call) -> None:
    cu, cpu = call.cu_seqlens, call.cu_seqlens_cpu
    # On a GPU the offsets are read only if that costs no wait; kernels clamp them to [0, T] in any case.
    for name, offsets in (("cu_seqlens", cu), ("cu_seqlens_cpu", cpu)):
        if offsets is not None and (offsets.device.type == "cpu" or _values_wanted()):
            _check_offset_values(name, offsets.tolist(), call.q.shape[1])
    if cpu is not None and (cu.device.type == "cpu" or _values_wanted()) and cu.tolist() != cpu.tolist():
        refuse("cu_seqlens_cpu", cpu.tolist(), f"a copy of cu_seqlens = {cu.tolist()}")


def _check_offset_values(name: str, offsets: list[int], tokens: int) -> None:
    if offsets[0] != 0:
        refuse(f"{name}[0]", offsets[0], "0")
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            refuse(f"{name}[{i + 1}]", b, f"at least {name}[{i}] = {a}")
    if offsets[-1] > tokens:
        refuse(f"{name}[-1]", offsets[-1], f"at most T = {tokens}")


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
    """What only reading the data can show; rows of no sequence hold anything, and are not read."""
    tokens = call.q.shape[1] if call.cu_seqlens is None else int(call.cu_seqlens[-1])
    for name in ("q", "k", "v", "beta"):
        _check_finite(name, getattr(call, name)[:, :tokens])
    for name in ("A_log", "dt_bias", "initial_state"):
        _check_finite(name, getattr(call, name))
    g = call.g[:, :tokens]
    if call.use_gate_in_kernel:
        _check_finite("g", g)
        return
    wrong, must = ~(g <= 0), "a log decay <= 0"
    if call.safe_gate:
        wrong, must = ~((g <= 0) & (g >= SAFE_BOUND)), f"in [{SAFE_BOUND:g}, 0] when safe_gate is True"
    if bool(wrong.any()):
        at = _first(wrong)
        refuse(f"g{at}", g[tuple(at)].item(), must)
