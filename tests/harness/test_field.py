"""Fields: the error of every element, by the same measure as the verdict, in the caller's own layout."""

from dataclasses import replace

import pytest
import torch

from harness.call import call
from harness.field import form, measure
from harness.problem import Problem, materialise
from harness.subject import load_subject
from harness.verdict import judge
from oracle.envelope import LIMITS

RANDOM = {"q": "unit", "v": "gauss", "g": "mild", "beta": "uniform", "do": "gauss", "dht": "gauss", "h0": "gauss"}
PROBLEM = Problem(
    entry="chunk", lengths=(3, 0, 5), packed=True, tail=2, heads=2, group=2, K=3, V=2, initial_state=True, **RANDOM
)


def outputs(problem: Problem, subject: str = "right"):
    route = load_subject(f"tests.harness.subjects:{subject}").route("chunk-unbounded", "chunk")
    case = materialise(problem)
    return case, route, call(route, case).outputs


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, intermediates=True, v_first=True, gate="softplus", g="gauss", A_log="gauss", dt_bias="gauss"),
    ],
    ids=["plain", "every_quantity"],
)
def test_right_outputs_are_inside_everywhere(problem):
    case, route, got = outputs(problem)
    fields = measure(case.inputs, case.options, got, entry="chunk", spec=route.spec)
    assert set(fields) == problem.quantities()
    for name, field in fields.items():
        assert not bool(field.wrong.any()), name
        assert not bool(field.tolerance.isnan().any()), name
        assert field.got.shape == field.expected.shape == field.tolerance.shape == got[name].shape


def test_one_wrong_element_is_over_and_agrees_with_the_verdict():
    case, route, got = outputs(PROBLEM)
    got["o"] = got["o"].clone()
    got["o"][0, 4, 3, 1] += 0.5
    field = measure(case.inputs, case.options, got, entry="chunk", spec=route.spec)["o"]
    verdicts = judge(case.inputs, case.options, got, entry="chunk", spec=route.spec)
    verdict = next(v for v in verdicts if v.quantity == "o")
    assert field.wrong.nonzero().tolist() == [[0, 4, 3, 1]]
    assert verdict.census.over == 1 and verdict.census.worst[0].index == (0, 4, 3, 1)
    half_ulp = field.tolerance[0, 4, 3, 1] - LIMITS.element * verdict.census.worst[0].sigma
    assert 0 < half_ulp < 1e-6


def test_the_tail_allows_nothing_and_what_is_not_finite_is_over():
    case, route, got = outputs(PROBLEM)
    got["o"], got["ht"] = got["o"].clone(), got["ht"].clone()
    got["o"][0, 9, 0, 0] = 1e-30
    got["ht"][1, 0, 0, 0] = torch.nan
    fields = measure(case.inputs, case.options, got, entry="chunk", spec=route.spec)
    assert fields["o"].wrong.nonzero().tolist() == [[0, 9, 0, 0]]
    assert fields["ht"].ratio[1, 0, 0, 0] == torch.inf
    assert int(fields["ht"].wrong.sum()) == 1


def test_only_the_asked_heads_are_measured():
    case, route, got = outputs(PROBLEM)
    everything = measure(case.inputs, case.options, got, entry="chunk", spec=route.spec)
    some = measure(case.inputs, case.options, got, entry="chunk", spec=route.spec, queries=[1])
    assert some["o"].tolerance[0, :8, :2].isnan().all() and some["dk"].tolerance[0, :8, :1].isnan().all()
    assert not some["o"].tolerance[0, :8, 2:].isnan().any()
    assert float(some["o"].ratio[0, :8, :2].abs().max()) == 0.0
    assert some["o"].expected.equal(everything["o"].expected)


def test_the_form_that_a_quantity_must_have():
    case, route, _ = outputs(replace(PROBLEM, dtype="bf16"))
    assert form(case, "o", "chunk", route.spec) == ([1, 10, 4, 2], torch.bfloat16)
    assert form(case, "ht", "chunk", route.spec) == ([3, 4, 3, 2], torch.float32)
    assert form(case, "dbeta", "chunk", route.spec) == ([1, 10, 4], None)
