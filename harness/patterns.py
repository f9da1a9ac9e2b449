"""Authority on named value patterns: what a tensor may be filled with, simplest to read first.

A pattern maps (rng, shape) to float32 values. Token-wise tensors have shape `[rows, heads, D]` (rows = all tokens of
the batch), beta `[rows, heads]`, states `[N, heads, K, V]`, A_log `[heads]`, dt_bias `[heads, K]`. Only seeded patterns
use the rng. Exponentials and logarithms are taken in float64 and then rounded: the last bits in which machines'
libraries differ do not reach the tensors.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

Pattern = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
BOUND = -5.0
SPIKE_EVERY = 7  # tokens between two spikes or resets; no chunk or block size is a multiple of it


def _full(value: float) -> Pattern:
    return lambda rng, shape: np.full(shape, value, np.float32)


def _gauss(rng, shape):
    return rng.standard_normal(shape, dtype=np.float32)


def _ramp(rng, shape):
    """1, 2, 3, ... 8 over the channels, another start at every row: readable, and no two neighbours alike."""
    index = np.indices(shape, dtype=np.int64).sum(0)
    return ((index % 8 + 1) / 8).astype(np.float32)


def _onehot(rng, shape):
    """Row r has a single 1 (or -1 on odd turns), in channel r mod D."""
    out = np.zeros(shape, np.float32)
    rows = np.arange(shape[0])
    out[rows, ..., rows % shape[-1]] = np.where((rows // shape[-1]) % 2 == 0, 1.0, -1.0).reshape(
        -1, *[1] * (len(shape) - 2)
    )
    return out


def _alternating(rng, shape):
    sign = np.where(np.indices(shape).sum(0) % 2 == 0, 1.0, -1.0)
    return (sign / math.sqrt(shape[-1])).astype(np.float32)


def _dyadic(rng, shape):
    """Small multiples of 1/4: sums and products of a few of them are exact in every format."""
    return (rng.integers(-4, 5, shape) / 4).astype(np.float32)


def _unit(rng, shape):
    x = _gauss(rng, shape)
    return x / (np.sqrt((x * x).sum(-1, keepdims=True)) * np.float32(1.01))  # still <= 1 after rounding to bf16


def _repeated(rng, shape):
    """One unit row per head, the same at every token."""
    return np.broadcast_to(_unit(rng, (1, *shape[1:])), shape).copy()


def _near_repeated(rng, shape):
    x = _repeated(rng, shape) + 0.05 / math.sqrt(shape[-1]) * _gauss(rng, shape)
    return x / (np.sqrt((x * x).sum(-1, keepdims=True)) * np.float32(1.01))


def _scaled(pattern: Pattern, factor: float) -> Pattern:
    return lambda rng, shape: pattern(rng, shape) * np.float32(factor)


def _some_zero(rng, shape):
    """Unit rows, every third one exactly zero."""
    x = _unit(rng, shape)
    x[::3] = 0
    return x


def _mild(rng, shape):
    return (-0.5 * np.logaddexp(0, _gauss(rng, shape).astype(np.float64) - 1)).astype(np.float32)


def _half_bound(rng, shape):
    """Even channels at the bound, odd ones nearly still."""
    g = -1e-3 * rng.random(shape, dtype=np.float32)
    g[..., ::2] = BOUND
    return g


def _bounded(rng, shape):
    return (BOUND / (1 + np.exp(-_gauss(rng, shape).astype(np.float64)))).astype(np.float32)


def _spikes(value: float) -> Pattern:
    """Slow decay with `value` at every seventh token, and in one channel two tokens later."""

    def make(rng, shape):
        g = -0.05 * rng.random(shape, dtype=np.float32)
        g[3::SPIKE_EVERY] = value
        g[5::SPIKE_EVERY, :, 0] = value
        return g

    return make


def _dyadic_gate(rng, shape):
    """0, or -ln 2 at every third token: the state halves exactly."""
    g = np.zeros(shape, np.float32)
    g[1::3] = -math.log(2)
    return g


def _time_constants(rng, shape):
    """Decay constant over time, its time constant log-uniform in [2, 10 T] per channel: long memories beside short
    ones.
    """
    tau = 2 * np.exp(rng.random((1, *shape[1:])) * math.log(max(10 * shape[0], 4) / 2))
    return np.broadcast_to(-1 / tau, shape).astype(np.float32).copy()


def _extreme_mix(*values: float) -> Pattern:
    return lambda rng, shape: rng.choice(np.array(values, np.float32), shape)


def _uniform(low: float, high: float) -> Pattern:
    return lambda rng, shape: (low + (high - low) * rng.random(shape, dtype=np.float32)).astype(np.float32)


def _dyadic_beta(rng, shape):
    """1/2 and 1, different at neighbouring tokens."""
    rows = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return np.broadcast_to(np.where(rows % 2 == 0, 0.5, 1.0), shape).astype(np.float32).copy()


def _kimi_A_log(rng, shape):
    """log A with A uniform in [1, 16]."""
    return np.log(_uniform(1, 16)(rng, shape).astype(np.float64)).astype(np.float32)


def _kimi_dt_bias(rng, shape):
    """softplus^-1 of a step log-uniform in [1e-3, 1e-1]."""
    dt = np.exp(_uniform(math.log(1e-3), math.log(1e-1))(rng, shape).astype(np.float64))
    return (dt + np.log(-np.expm1(-dt))).astype(np.float32)


VALUES: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "ones": _full(1.0),
    "ramp": _ramp,
    "onehot": _onehot,
    "alternating": _alternating,
    "dyadic": _dyadic,
    "unit": _unit,
    "gauss": _gauss,
    "repeated": _repeated,
    "near_repeated": _near_repeated,
    "some_zero": _some_zero,
    "tiny": _scaled(_unit, 1e-6),
    "huge": _scaled(_gauss, 1e4),
    "gauss_1e3": _scaled(_gauss, 1e3),
}
GATES: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "slow": _full(-1e-4),
    "bound": _full(BOUND),
    "dyadic": _dyadic_gate,
    "half_bound": _half_bound,
    "mild": _mild,
    "bounded": _bounded,
    "time_constants": _time_constants,
    "spikes_50": _spikes(-50.0),
    "spikes_500": _spikes(-500.0),
    "spikes_1e6": _spikes(-1e6),
    "resets": _spikes(-math.inf),
}
BELOW_BOUND = frozenset({"spikes_50", "spikes_500", "spikes_1e6", "resets"})  # what safe_gate promises not to have
RAW_GATES: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "ramp": _ramp,
    "gauss": _gauss,
    "raw_30": _extreme_mix(-30.0, 30.0, 0.0),
    "raw_100": _extreme_mix(-100.0, -90.0, -80.0, 90.0, 1.0),
    "raw_1e4": _extreme_mix(-1e4, 1e4, 0.0),
}
BETAS: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "ones": _full(1.0),
    "half": _full(0.5),
    "twos": _full(2.0),
    "dyadic": _dyadic_beta,
    "uniform": _uniform(0.0, 1.0),
    "near_one": _full(0.9997),
}
BETA_LOGITS: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "gauss": _gauss,
    "high": _full(30.0),
    "saturated": _extreme_mix(-30.0, 30.0),
    "raw_100": _extreme_mix(-100.0, 100.0, 0.0),
}
A_LOGS: Mapping[str, Pattern] = {
    "zeros": _full(0.0),
    "gauss": _gauss,
    "kimi": _kimi_A_log,
    "extreme_80": _full(80.0),
    "extreme_minus_80": _full(-80.0),
}
DT_BIASES: Mapping[str, Pattern] = {"zeros": _full(0.0), "gauss": _gauss, "kimi": _kimi_dt_bias}
