"""Every variant holds for a kernel that is right, and tells on one that is wrong in the way it is there for."""

import functools
from dataclasses import replace

import pytest
import torch

from harness import variants
from harness.agreement import violations
from harness.call import Route
from harness.families import ORDINARY, family
from harness.fitting import for_decoding
from harness.problem import Problem, materialise
from harness.runner import Runner
from harness.serving import Served
from harness.subject import Subject, own_subject
from harness.variants import VARIANTS, applicable
from harness.verdict import judge
from kda.fused_recurrent import PRECISION
from tests.harness.wrong_forms import WRONG, right

PACKED = Problem(
    entry="chunk", lengths=(3, 0, 4), packed=True, tail=2, heads=2, K=3, V=3, initial_state=True, **ORDINARY
)
DENSE = replace(
    PACKED,
    lengths=(4, 4),
    packed=False,
    tail=0,
    **{"gate": "softplus", "g": "gauss", "A_log": "gauss", "dt_bias": "gauss"},
)
GATE = Problem(
    entry="gate", lengths=(9,), heads=2, K=3, g="gauss", gate="softplus", A_log="gauss", dt_bias="gauss", do="gauss"
)
DECODE = replace(for_decoding(PACKED), step=2)
DENSE_DECODE = replace(for_decoding(DENSE), step=3, rejected=2, state_dtype="bf16")


def our_route(problem: Problem) -> Route:
    return own_subject().route("recurrent" if problem.entry == "chunk" else problem.entry, problem.entry)


@functools.cache
def our_outputs(problem: Problem) -> dict[str, torch.Tensor]:
    return variants.run(our_route(problem), materialise(problem), None).outputs


def route_of(function) -> Route:
    return Route("chunk-unbounded", "chunk", function, PRECISION, invariant=True)


@pytest.mark.parametrize("name", vars(WRONG))
def test_variant_tells_on_what_it_is_there_for(name):
    variant = VARIANTS[name]
    problem = next(p for p in (PACKED, DENSE) if variant.applies(p))
    case, route = materialise(problem), route_of(getattr(WRONG, name))
    first = variants.run(route, case, None).outputs
    second = variants.run(route, case, variant).outputs
    assert {(v.klass, v.statistic) for v in violations(variant, case, first, second)} == {("BUG", name)}


@pytest.mark.parametrize(
    "problem",
    [PACKED, DENSE, GATE, DECODE, DENSE_DECODE],
    ids=["packed", "dense", "gate", "decode-packed", "decode-dense"],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_holds_for_our_kernels(problem, name):
    route, variant, case = our_route(problem), VARIANTS[name], materialise(problem)
    assert (variant in applicable(route, problem)) == variant.applies(problem)
    if variant.applies(problem):
        second = variants.run(route, case, variant).outputs
        assert list(violations(variant, case, our_outputs(problem), second)) == []


def test_every_variant_applies_to_some_problem():
    assert all(any(variant.applies(problem) for problem in (PACKED, DENSE, DECODE)) for variant in VARIANTS.values())


def test_routes_that_promise_nothing_are_held_to_universal_forms_only():
    foreign = replace(route_of(right), invariant=False)
    assert {variant.name for variant in applicable(foreign, PACKED)} == {
        name for name, variant in VARIANTS.items() if variant.universal
    }


def keeps_every_draft(decode):
    """The counts of accepted tokens are not read: the next call begins from the last draft."""

    def function(slots, num_accepted_tokens=None, **rest):
        counts = None if num_accepted_tokens is None else torch.full_like(num_accepted_tokens, slots.shape[1])
        return decode(slots=slots, num_accepted_tokens=counts, **rest)

    return function


def rounds_at_the_end_of_a_call(decode):
    """States go from token to token of a call in fp32, whatever the pool."""

    def function(state_pool, slots, **rest):
        wide = state_pool.float()
        o = decode(state_pool=wide, slots=slots, **rest)
        kept = slots[slots >= 0]
        state_pool[kept] = wide[kept].to(state_pool.dtype)
        return o

    return function


@pytest.mark.parametrize(
    "wrong, name", [(keeps_every_draft, "drafts"), (rounds_at_the_end_of_a_call, "one_token_a_call")]
)
def test_forms_of_decoding_tell_on_what_they_are_there_for(wrong, name):
    problem = replace(DENSE_DECODE, step=2, rejected=0)
    route, variant, case = our_route(problem), VARIANTS[name], materialise(problem)
    faulty = replace(route, function=Served(wrong(route.function.decode)))
    first, second = (variants.run(faulty, case, form).outputs for form in (None, variant))
    assert {(v.klass, v.statistic) for v in violations(variant, case, first, second)} == {("BUG", name)}


@pytest.mark.parametrize("isolated", [False, True], ids=["here", "child"])
def test_runner_reports_a_form_that_differs(tmp_path, isolated):
    subject = Subject("tests.harness.subjects:uses_the_future", "", (route_of(WRONG.causal),))
    runner = Runner(subject, "cpu", tmp_path, isolated=isolated)
    try:
        verdicts = runner.check("chunk-unbounded", PACKED, forms=("causal",)).verdicts
    finally:
        runner.close()
    assert ("o", "causal") in {(v.quantity, v.statistic) for v in verdicts}


@pytest.mark.parametrize("size, klass", [(2.0**-19, "BUG"), (2.0**-22, "OK")], ids=["above", "below"])
def test_nearly_exact_problems_allow_almost_nothing(size, klass):
    """A chunk kernel with bf16 operands, and one part in half a million of a state."""
    problem = replace(family("dyadic").examples[2], entry="chunk")
    case, route = materialise(problem), own_subject().route("chunk-unbounded", "chunk")
    outputs = variants.run(route, case, None).outputs
    outputs["ht"] = outputs["ht"] + size * outputs["ht"].abs().amax()
    wanted = {"entry": "chunk", "spec": route.spec.of_call(64, "ieee"), "quantities": frozenset({"ht"})}
    (verdict,) = judge(case.inputs, case.options, outputs, near_exact=True, **wanted)
    assert verdict.klass == klass
    (verdict,) = judge(case.inputs, case.options, outputs, **wanted)
    assert verdict.klass == "OK"


def test_sums_that_cancel_are_not_nearly_exact():
    """dt_bias's gradient is left of terms forty times as large: fp32 sums of those alone move it by more than that."""
    dyadic = {"q": "dyadic", "k": "onehot", "v": "ramp", "h0": "dyadic", "do": "dyadic", "dht": "dyadic"}
    gates = {"gate": "lower_bound", "lower_bound": -5.0, "dt_bias": "zeros", "g": "zeros", "v_first": True}
    problem = Problem(entry="chunk", lengths=(15,), K=64, V=64, dtype="bf16", **gates, **dyadic, seed=14871)
    case, route = materialise(problem), own_subject().route("chunk-unbounded", "chunk")
    outputs = variants.run(route, case, None).outputs
    given = {"entry": "chunk", "spec": route.judged_by(problem), "near_exact": True}
    found = {v.quantity: (v.klass, v.statistic) for v in judge(case.inputs, case.options, outputs, **given)}
    assert found["ddt_bias"][0] == "OK" and found["ddt_bias"][1] != "near_exact"
