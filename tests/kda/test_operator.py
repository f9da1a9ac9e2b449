"""Every option of the operator, on every route that takes it, against the oracle: forward, state and gradients."""

import pytest

from harness.families import ORDINARY
from harness.fitting import fitted
from harness.problem import Problem

ROUTES = ("recurrent", "torch", "chunk-safe_gate", "chunk-unbounded")
PARTS = {
    "forward": {"o"},
    "state": {"ht", "h"},
    "gradients": {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"},
}

PLAIN = {**ORDINARY, "lengths": (12,), "K": 8, "V": 8, "initial_state": True}
LOGITS = {"beta_sigmoid": True, "beta": "gauss"}
NORMALISED = {"l2norm": True, "q": "gauss", "k": "gauss"}
SOFTPLUS = {"gate": "softplus", "A_log": "gauss", "dt_bias": "gauss", "g": "gauss"}
BOUNDED = {"gate": "lower_bound", "lower_bound": -5.0, "A_log": "gauss", "dt_bias": "gauss", "g": "gauss"}


def problem(**changes: object) -> Problem:
    return Problem(**{**PLAIN, **changes})


PROBLEMS = [
    problem(),
    problem(initial_state=False, final_state=False, loss="o", scale=0.3),
    problem(loss="state", V=5),
    problem(lengths=(7, 7), heads=2, group=2, K=5, V=12, dtype="bf16", gate_dtype="bf16"),
    problem(K=12, V=20, dtype="fp16", v_first=True, **NORMALISED),
    problem(group=3, heads=2, **NORMALISED, **SOFTPLUS, **LOGITS),
    problem(dtype="bf16", K=16, V=16, **NORMALISED, **BOUNDED, **LOGITS, neg_eigval=True),
    problem(**{**BOUNDED, "A_log": None, "dt_bias": None}, v_first=True),
    problem(**{**SOFTPLUS, "dt_bias": None}, gate_dtype="fp16"),
    problem(lengths=(5, 0, 16, 1), packed=True, tail=3, offsets="int32", group=2, v_first=True, **SOFTPLUS, **LOGITS),
    problem(lengths=(9, 4), packed=True, group=2, dtype="bf16", **NORMALISED, **SOFTPLUS),
    problem(lengths=(0, 0, 5), packed=True, dtype="fp16", **BOUNDED),
    problem(lengths=(0,), packed=True, tail=4),
    problem(g="resets", lengths=(16,)),
    problem(g="resets", lengths=(6, 8), packed=True, dtype="bf16", group=2),
    problem(g="spikes_500"),
    problem(g="spikes_1e6", gate_dtype="bf16"),
    problem(**{**SOFTPLUS, "g": "raw_1e4", "A_log": "extreme_80"}),
    problem(**{**BOUNDED, "g": "raw_100", "A_log": "extreme_80"}),
    problem(k="repeated", beta="twos", g="zeros", lengths=(32,), initial_state=False),
    problem(beta="raw_100", beta_sigmoid=True, neg_eigval=True),
    problem(k="zeros", q="tiny", l2norm=True),
    problem(K=1, V=1, lengths=(5,)),
    problem(K=100, V=60, lengths=(4,), **NORMALISED, **SOFTPLUS),
    problem(K=256, V=3, lengths=(3,)),
    problem(K=3, V=256, lengths=(3,), dtype="bf16"),
    problem(K=128, V=128, lengths=(3,), dtype="bf16", gate_dtype="bf16", **NORMALISED, **BOUNDED, **LOGITS),
]
CHUNK_PROBLEMS = [
    problem(entry="chunk", intermediates=True, chunk_size=32, lengths=(40,), K=4, V=3),
    problem(
        entry="chunk",
        intermediates=True,
        chunk_size=32,
        lengths=(33, 0, 1),
        packed=True,
        tail=2,
        v_first=True,
        K=4,
        V=6,
        group=2,
    ),
    problem(entry="chunk", intermediates=True, lengths=(10, 10), K=3, V=4, **BOUNDED, safe_gate=True),
    problem(entry="chunk", lengths=(8,), dtype="bf16", **SOFTPLUS),
]


def for_route(route: str, problem: Problem) -> Problem | None:
    """The problem as the route can take it; the token-by-token routes take every entry as it stands."""
    return fitted(problem, route, "chunk" if route.startswith("chunk") else problem.entry)


CASES = [
    (route, problem, part)
    for route in ROUTES
    for problem in (for_route(route, problem) for problem in PROBLEMS + CHUNK_PROBLEMS)
    if problem is not None
    for part, quantities in PARTS.items()
    if quantities & problem.quantities()
]


@pytest.mark.parametrize("route, problem, part", CASES)
def test_operator(route, problem, part, judge):
    verdicts = judge(route, problem)
    wanted = PARTS[part] & problem.quantities()
    assert verdicts.keys() >= wanted, "a quantity was not judged"
    assert [str(verdicts[name]) for name in sorted(wanted) if verdicts[name].klass != "OK"] == []
