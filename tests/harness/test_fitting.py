"""Problems fitted to routes that take a part of the operator: what changes, what cannot be had, and who agrees."""

import pytest

import kda
from harness.call import NotCovered, call, keywords
from harness.families import FAMILIES
from harness.fitting import FITS, fit
from harness.problem import Problem, materialise
from harness.subject import own_subject

PLAIN = Problem(entry="chunk", K=5, V=100)
BOUNDED = {"gate": "lower_bound", "lower_bound": -5.0}
SOFTPLUS = {"gate": "softplus", "A_log": "zeros"}


@pytest.mark.parametrize(
    "changes, fitted",
    [
        ({}, {"safe_gate": True}),
        ({"g": "resets"}, None),
        ({"gate": "softplus", "A_log": "zeros"}, None),
        ({**BOUNDED}, {**BOUNDED, "safe_gate": True}),
        ({**BOUNDED, "lower_bound": -6.0}, None),
        ({"intermediates": True}, None),
    ],
    ids=["pregated", "resets", "softplus", "bounded", "wide_bound", "intermediates"],
)
def test_fused_safe_gate_problems(changes, fitted):
    problem = Problem(**{**vars(PLAIN), **changes})
    expected = None if fitted is None else Problem(**{**vars(PLAIN), "dtype": "bf16", "K": 64, "V": 128, **fitted})
    assert fit("fused-safe_gate", problem) == expected


@pytest.mark.parametrize("route", [route for route in FITS if not route.startswith("chunk")])
def test_fitted_examples_are_calls_that_the_route_takes(route, device):
    """The harness' idea of what a route takes against the route's own verifier, over every family."""
    fitted = {fit(route, p) for f in FAMILIES if not f.gpu_only for p in f.examples if p.entry == "chunk"}
    fitted |= {fit(route, Problem(**{**vars(PLAIN), **changes})) for changes in ({}, BOUNDED, SOFTPLUS)}
    refused = {}
    for problem in filter(None, fitted):
        case = materialise(problem, device)
        names = [name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias") if name in case.inputs]
        words = keywords(case, "chunk") | {"initial_state": case.inputs.get("initial_state")}
        with kda.force_route(route):
            explanation = kda.explain("chunk_kda", **{name: case.inputs[name] for name in names}, **words)
        if explanation.route != route:
            refused[problem] = dict(explanation.reasons)[route]
    assert fitted - {None} and refused == {}


def test_a_problem_that_does_not_fit_is_not_covered(device):
    route = own_subject().route("fused-unbounded", "chunk")
    with pytest.raises(NotCovered, match="K=64"):
        call(route, materialise(PLAIN, device))


def test_the_precision_of_fp32_products_does_not_survive_in_bf16():
    problem = Problem(entry="chunk", K=5, V=100, dtype="fp32", precision="tf32")
    assert (fit("fused-unbounded", problem).dtype, fit("fused-unbounded", problem).precision) == ("bf16", "ieee")


def test_routes_that_take_everything_get_the_problem_itself():
    assert fit("recurrent", PLAIN) is PLAIN
