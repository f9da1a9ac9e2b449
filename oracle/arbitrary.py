"""Authority on the operator where float64 is not enough: every quantity to a stated number of digits.

The mathematics is in `arbitrary_operator`; here are its precision (doubled until two agree), the way in and out, and
central differences.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mpmath
import numpy as np
import torch
from mpmath import mp, mpf
from torch import Tensor

from oracle import arbitrary_operator
from oracle.arbitrary_operator import Arrays, CallOptions

Inputs = Mapping[str, Tensor | None]
GUARD_DIGITS = 20
MOST_DIGITS = 10_000
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

_to_mpf = np.frompyfunc(mpf, 1, 1)


@dataclass(frozen=True)
class Agreed:
    """What two precisions agreed on: `values` are object arrays of mpf by quantity, in the layouts of the kernels' API.

    Every element agrees to `digits` significant decimal digits, or to `2 * digits` digits of the largest element of its
    array (so that an exact 0 left over by cancellation can agree too); `precision` is the number of decimal digits of
    the finer computation.
    """

    values: Arrays
    digits: int
    precision: int

    def to_float64(self) -> dict[str, Tensor]:
        """The values rounded to float64, as tensors of the same shapes."""
        return {name: torch.from_numpy(value.astype(np.float64)) for name, value in self.values.items()}


def evaluate(inputs: Inputs, options: CallOptions, *, gradients: bool = True, digits: int = 50) -> Agreed:
    """o, ht, h and every gradient of a call; for small problems: about 35 us per token, head, key and value channel.

    `inputs`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`, and optionally A_log `[HV]`,
    dt_bias `[HV * K]`, initial_state `[N, HV, K, V]`, cu_seqlens `[N + 1]`, do (like o), dht (like the state); any
    dtype, taken exactly. `options`: anything with the attributes of a KDA call. Raises ValueError for `digits` below 1
    and ArithmeticError if no precision agrees.
    """
    call, cu_seqlens = _read(inputs), _offsets(inputs)
    return _agreed(lambda: arbitrary_operator.operator(call(), cu_seqlens, options, gradients), digits)


def evaluate_gate(inputs: Inputs, options: CallOptions, *, gradients: bool = True, digits: int = 50) -> Agreed:
    """o = the activated natural-log gate `[B, T, HV, K]` of g, A_log, dt_bias; with `do` also dg, dA_log, ddt_bias."""
    call = _read(inputs)
    return _agreed(lambda: arbitrary_operator.gate(call(), options, gradients), digits)


def central_difference(
    inputs: Inputs,
    options: CallOptions,
    tensor_name: str,
    index: tuple[int, ...],
    *,
    digits: int = 60,
    step: str = "1e-25",
) -> mpf:
    """(L(x + step) - L(x - step)) / (2 step) for x = `inputs[tensor_name][index]` and L = sum(o do) + sum(ht dht).

    Computed with `digits` decimal digits; knows nothing of any adjoint. Without q in `inputs` the call is that of the
    gate alone. An infinite x gives 0: nothing moves it. Raises ValueError for a tensor that has no gradient.
    """
    if tensor_name not in DIFFERENTIABLE or inputs.get(tensor_name) is None:
        present = [name for name in DIFFERENTIABLE if inputs.get(name) is not None]
        raise ValueError(f"tensor_name is {tensor_name!r}, must be one of {present}")
    call, cu_seqlens = _read(inputs), _offsets(inputs)

    def loss(shift: mpf) -> mpf:
        x = call()
        x[tensor_name][index] += shift
        if "q" in x:
            out = arbitrary_operator.operator(x, cu_seqlens, options, gradients=False)
        else:
            out = arbitrary_operator.gate(x, options, gradients=False)
        pairs = [(out[result], x[incoming]) for result, incoming in (("o", "do"), ("ht", "dht")) if incoming in x]
        return sum((arbitrary_operator.product(a, b).sum(initial=mpf(0)) for a, b in pairs), mpf(0))

    with mpmath.workdps(digits):
        shift = mpf(step)
        return (loss(shift) - loss(-shift)) / (2 * shift)


def _read(inputs: Inputs) -> Callable[[], Arrays]:
    """A maker of fresh, exact object arrays of the inputs, called within the precision that will compute with them."""
    doubles = {
        name: value.detach().cpu().double().numpy()
        for name, value in inputs.items()
        if value is not None and name != "cu_seqlens"
    }
    return lambda: {name: _to_mpf(value) for name, value in doubles.items()}


def _offsets(inputs: Inputs) -> list[int] | None:
    cu_seqlens = inputs.get("cu_seqlens")
    return None if cu_seqlens is None else [int(offset) for offset in cu_seqlens.tolist()]


# NOTE [Agreement]
# Rounded to nearest, two precisions can agree on nonsense: 10^300 + (v - 10^300) is 0 at 40 digits and at 80. So one of
# the two rounds everything down and the other everything up: what was lost then shows as a difference as large as the
# last digit of the term it was lost against, and the precision doubles until that no longer matters.
def _agreed(compute: Callable[[], Arrays], digits: int) -> Agreed:
    if digits < 1:
        raise ValueError(f"digits is {digits}, must be at least 1")
    precision, toward, opposite = 2 * digits + GUARD_DIGITS, "floor", "ceiling"
    coarse = _at(precision, toward, compute)
    while precision <= max(MOST_DIGITS, 4 * digits):
        precision, toward, opposite = 2 * precision, opposite, toward
        fine = _at(precision, toward, compute)
        with mpmath.workdps(precision):
            if all(_agree(coarse[name], fine[name], digits) for name in fine):
                return Agreed(fine, digits, precision)
        coarse = fine
    raise ArithmeticError(f"{precision // 2} and {precision} decimal digits do not agree to {digits}")


def _at(precision: int, toward: str, compute: Callable[[], Arrays]) -> Arrays:
    """The values with `precision` decimal digits, every inexact operation rounded to the 'floor' or the 'ceiling'."""
    with mpmath.workdps(precision), _rounding(toward[0]):
        return compute()


@contextlib.contextmanager
def _rounding(mode: str) -> Iterator[None]:
    before = mp._prec_rounding[1]
    mp._prec_rounding[1] = mode
    try:
        yield
    finally:
        mp._prec_rounding[1] = before


def _agree(coarse: np.ndarray, fine: np.ndarray, digits: int) -> bool:
    least = mpf(10) ** -digits
    largest = max((abs(x) for x in fine.flat if mpmath.isfinite(x)), default=mpf(0))

    def same(a: mpf, b: mpf) -> bool:
        return a == b or (mpmath.isnan(a) and mpmath.isnan(b)) or abs(a - b) <= least * (abs(b) + least * largest)

    return all(map(same, coarse.flat, fine.flat))
