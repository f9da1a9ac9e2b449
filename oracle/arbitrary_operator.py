"""Authority on the operator in scalars: object arrays of mpf at the precision in force, and an adjoint of its own.

Shares no code with the float64 oracle, so that a mistake there is not one here. Exponents of an mpf are unbounded:
nothing over- or underflows, and infinities occur only where an input is one.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mpmath
import numpy as np
from mpmath import mpf

Arrays = dict[str, np.ndarray]
Adjoint = Callable[[np.ndarray], np.ndarray]


class CallOptions(Protocol):
    """The attributes of a call that the operator reads."""

    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    chunk_size: int
    intermediates: bool


def _zero_absorbs(a: mpf, b: mpf) -> mpf:
    """a b where 0 * inf is 0: a gradient that is exactly 0 stays 0 through an infinite gate."""
    return mpf(0) if not a or not b else a * b


exp = np.frompyfunc(mpmath.exp, 1, 1)
sigmoid = np.frompyfunc(lambda x: 1 / (1 + mpmath.exp(-x)), 1, 1)
softplus = np.frompyfunc(lambda z: z if z == mpmath.inf else mpmath.log1p(mpmath.exp(z)), 1, 1)
inverse_root = np.frompyfunc(lambda x: 1 / mpmath.sqrt(x), 1, 1)
product = np.frompyfunc(_zero_absorbs, 2, 1)


def zeros(*shape: int) -> np.ndarray:
    return np.full(shape, mpf(0), dtype=object)


def total(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    return x.sum(axis, initial=mpf(0))


def sigmoid_slope(x: np.ndarray) -> np.ndarray:
    """sigmoid'(x) = sigmoid(x) sigmoid(-x), which does not cancel."""
    return sigmoid(x) * sigmoid(-x)


def l2norm(x: np.ndarray) -> tuple[np.ndarray, Adjoint]:
    """y = x r with r = 1 / sqrt(sum x^2 + 1e-6) over the last axis; dx = r (dy - y (y . dy))."""
    r = inverse_root(total(x * x, -1) + mpf("1e-6"))[..., None]
    y = x * r
    return y, lambda dy: r * (dy - y * total(y * dy, -1)[..., None])


def activate_beta(beta: np.ndarray, options: CallOptions) -> tuple[np.ndarray, Adjoint]:
    """beta itself, sigmoid(beta), or 2 sigmoid(beta)."""
    if not options.use_beta_sigmoid_in_kernel:
        return beta, lambda dy: dy
    factor = 2 if options.allow_neg_eigval else 1
    return sigmoid(beta) * factor, lambda dy: product(dy, sigmoid_slope(beta) * factor)


def activate_gate(x: Arrays, options: CallOptions) -> tuple[np.ndarray, Callable[[np.ndarray], Arrays]]:
    """The log gate of raw g `[B, T, HV, K]`, and the map of its gradient to those of raw g, A_log and dt_bias.

    With z = g + dt_bias and rate = exp(A_log): -rate softplus(z), or lower_bound sigmoid(rate z).
    """
    heads, channels = x["g"].shape[2:]
    rate = exp(x["A_log"] if "A_log" in x else zeros(heads)).reshape(heads, 1)
    z = x["g"] + (x["dt_bias"].reshape(heads, channels) if "dt_bias" in x else mpf(0))
    if options.lower_bound is None:
        gate = -product(rate, softplus(z))
        wrt_z = -rate * sigmoid(z)
        wrt_A_log = gate
    else:
        bound, scaled = mpf(options.lower_bound), product(rate, z)
        gate = sigmoid(scaled) * bound
        wrt_z = sigmoid_slope(scaled) * rate * bound
        wrt_A_log = product(sigmoid_slope(scaled), scaled) * bound

    def adjoint(dgate: np.ndarray) -> Arrays:
        out = {"dg": product(dgate, wrt_z)}
        if "A_log" in x:
            out["dA_log"] = total(product(dgate, wrt_A_log), (0, 1, 3))
        if "dt_bias" in x:
            out["ddt_bias"] = total(out["dg"], (0, 1)).reshape(-1)
        return out

    return gate, adjoint


def gate(x: Arrays, options: CallOptions, gradients: bool) -> Arrays:
    """The gate alone: o, and its gradients for `do` if that is given."""
    o, adjoint = activate_gate(x, options)
    return {"o": o} | (adjoint(x["do"]) if gradients and "do" in x else {})


@dataclass
class _Token:
    """What the adjoint needs of one step: the decayed state S', the residual r, the update u, the state S after it."""

    decayed: np.ndarray
    residual: np.ndarray
    update: np.ndarray
    state: np.ndarray


def forward(q, k, v, g, beta, scale: mpf, state: np.ndarray) -> tuple[list[np.ndarray], list[_Token]]:
    """One sequence of one head: q, k, g `[T, K]`, v `[T, V]`, beta `[T]`, state `[K, V]`; (rows of o, the steps).

    S' = diag(exp g) S;  r = v - S'^T k;  u = beta r;  S = S' + k u^T;  o = scale S^T q.
    """
    rows, steps = [], []
    for t in range(len(beta)):
        decayed = exp(g[t])[:, None] * state
        residual = v[t] - k[t] @ decayed
        update = residual * beta[t]
        state = decayed + np.outer(k[t], update)
        rows.append((q[t] @ state) * scale)
        steps.append(_Token(decayed, residual, update, state))
    return rows, steps


def backward(q, k, g, beta, scale: mpf, steps: list[_Token], do, dstate: np.ndarray) -> tuple[list[tuple], np.ndarray]:
    """Gradients of sum(o do) + sum(S_T dstate): per token (dq, dk, dv, dg, dbeta), and that of the first state."""
    rows = []
    for t in reversed(range(len(steps))):
        step = steps[t]
        after = dstate + np.outer(q[t], do[t]) * scale
        dupdate = k[t] @ after
        dresidual = dupdate * beta[t]
        ddecayed = after - np.outer(k[t], dresidual)
        rows.append(
            (
                (step.state @ do[t]) * scale,
                after @ step.update - step.decayed @ dresidual,
                dresidual,
                total(ddecayed * step.decayed, -1),
                dupdate @ step.residual,
            )
        )
        dstate = exp(g[t])[:, None] * ddecayed
    return rows[::-1], dstate


class _Call:
    """A call with everything before the recurrence applied: q, k normalised, beta and g activated, states K first."""

    def __init__(self, x: Arrays, cu_seqlens: list[int] | None, options: CallOptions):
        self.x, self.options, self.packed = x, options, cu_seqlens is not None
        self.batch, self.length, self.query_heads, self.K = x["q"].shape
        self.heads, self.V = x["v"].shape[2:]
        if cu_seqlens is None:
            self.sequences = [(b, 0, self.length) for b in range(self.batch)]
        else:
            self.sequences = [(0, first, last) for first, last in itertools.pairwise(cu_seqlens)]
        self.scale = 1 / mpmath.sqrt(self.K) if options.scale is None else mpf(options.scale)
        plain: Callable = lambda y: (y, lambda dy: dy)  # noqa: E731
        normalise = l2norm if options.use_qk_l2norm_in_kernel else plain
        self.q, self.q_adjoint = normalise(x["q"])
        self.k, self.k_adjoint = normalise(x["k"])
        self.beta, self.beta_adjoint = activate_beta(x["beta"], options)
        self.g, self.g_adjoint = x["g"], lambda dg: {"dg": dg}
        if options.use_gate_in_kernel:
            self.g, self.g_adjoint = activate_gate(x, options)
        self.do = x.get("do", zeros(*x["v"].shape))
        self.first_state, self.dlast_state = self.states("initial_state"), self.states("dht")

    def states(self, name: str) -> np.ndarray:
        """`[N, HV, K, V]`, zeros if the caller gave none."""
        if name not in self.x:
            return zeros(len(self.sequences), self.heads, self.K, self.V)
        return self.callers_states(self.x[name])

    def callers_states(self, state: np.ndarray) -> np.ndarray:
        return state.swapaxes(-1, -2) if self.options.state_v_first else state

    def run(self, gradients: bool) -> Arrays:
        """Every quantity in the caller's layout; rows of tokens that belong to no sequence stay 0."""
        x = self.x
        out = {"o": zeros(*x["v"].shape), "ht": self.first_state.copy()}
        grad = {f"d{name}": zeros(*x[name].shape) for name in ("q", "k", "v", "g", "beta")}
        grad["dh0"] = self.dlast_state.copy()
        kept: list[np.ndarray] = []
        for n, (b, first, last) in enumerate(self.sequences):
            starts = range(0, last - first, self.options.chunk_size)
            chunks = zeros(len(starts), self.heads, self.K, self.V)
            for hv in range(self.heads):
                states = self.run_head(n, (b, slice(first, last)), hv, out, grad if gradients else None)
                for chunk, start in enumerate(starts):
                    chunks[chunk, hv] = states[start]
            kept.append(chunks)
        if self.options.intermediates:
            out["h"] = np.concatenate(kept)[None] if self.packed else np.stack(kept)
        return self.finish(out, grad if gradients else {})

    def run_head(self, n: int, where: tuple, hv: int, out: Arrays, grad: Arrays | None) -> list[np.ndarray]:
        """Fill in one sequence of one value head; the states before each of its tokens and the last one."""
        h = hv // (self.heads // self.query_heads)
        q, k = self.q[where][:, h], self.k[where][:, h]
        v, g, beta, do = (y[where][:, hv] for y in (self.x["v"], self.g, self.beta, self.do))
        rows, steps = forward(q, k, v, g, beta, self.scale, self.first_state[n, hv])
        for t, o in enumerate(rows):
            out["o"][where][t, hv] = o
        states = [self.first_state[n, hv], *(step.state for step in steps)]
        out["ht"][n, hv] = states[-1]
        if grad is not None:
            tokens, grad["dh0"][n, hv] = backward(q, k, g, beta, self.scale, steps, do, self.dlast_state[n, hv])
            for t, (dq, dk, dv, dg, dbeta) in enumerate(tokens):
                grad["dq"][where][t, h] += dq
                grad["dk"][where][t, h] += dk
                grad["dv"][where][t, hv] = dv
                grad["dg"][where][t, hv] = dg
                grad["dbeta"][where][t, hv] = dbeta
        return states

    def finish(self, out: Arrays, grad: Arrays) -> Arrays:
        if grad:
            out |= {"dq": self.q_adjoint(grad["dq"]), "dk": self.k_adjoint(grad["dk"]), "dv": grad["dv"]}
            out |= {"dbeta": self.beta_adjoint(grad["dbeta"])} | self.g_adjoint(grad["dg"])
            if "initial_state" in self.x:
                out["dh0"] = grad["dh0"]
        return out | {name: self.callers_states(out[name]) for name in ("ht", "h", "dh0") if name in out}


def operator(x: Arrays, cu_seqlens: list[int] | None, options: CallOptions, gradients: bool) -> Arrays:
    """o, ht, h (with `intermediates`) and, with `gradients`, that of every input; a missing do or dht is 0."""
    return _Call(x, cu_seqlens, options).run(gradients)
