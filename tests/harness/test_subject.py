"""Subjects: found by name, module or function, and asked only for what they have."""

import contextlib
import sys
import types
from dataclasses import replace

import pytest
import torch

import kda
from harness.bits import differing_bytes
from harness.call import NotCovered, RouteDidNotRun, call
from harness.problem import Problem, materialise
from harness.runner import Runner
from harness.subject import Subject, load_subject, signature_subject
from kda import registry

PLAIN = Problem(entry="chunk", lengths=(4,), K=4, V=4, k="unit", v="gauss", g="mild", beta="uniform")


@pytest.fixture
def module():
    made = types.ModuleType("a_subject_of_the_tests")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def chunk_like(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
               safe_gate=False, chunk_size=64):  # fmt: skip
    with kda.force_route("torch"):
        return kda.chunk_kda(q, k, v, g, beta, scale=scale, initial_state=initial_state,
                             output_final_state=output_final_state)  # fmt: skip


def recurrent_like(q, k, v, g, beta, output_final_state=False, initial_state=None):
    with kda.force_route("torch"), torch.no_grad():
        return kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)


def gate_like(g, A_log=None, dt_bias=None, lower_bound=None):
    with kda.force_route("torch"):
        return kda.fused_kda_gate(g, A_log, dt_bias, lower_bound=lower_bound)


def routes(subject: Subject) -> set[tuple[str, str]]:
    return {(route.id, route.entry) for route in subject.routes}


def test_functions_are_told_apart_by_their_arguments(module):
    module.one, module.two, module.three = chunk_like, recurrent_like, gate_like
    name = module.__name__
    assert routes(load_subject(f"{name}:one")) == {("chunk-safe_gate", "chunk"), ("chunk-unbounded", "chunk")}
    assert routes(load_subject(f"{name}:two")) == {("recurrent", "recurrent")}
    assert routes(load_subject(f"{name}:three")) == {("gate", "gate")}


def test_modules_factories_and_subjects(module):
    module.chunk_kda, module.fused_kda_gate, module.__version__ = chunk_like, gate_like, "7.1"
    whole = load_subject(module.__name__)
    assert {entry for _, entry in routes(whole)} == {"chunk", "gate"}
    assert (whole.version, whole.foreign) == ("7.1", True)
    module.factory = lambda: whole
    assert load_subject(f"{module.__name__}:factory") is whole


def test_the_environment_names_a_subject(module, monkeypatch):
    module.fused_kda_gate = gate_like
    monkeypatch.setenv("KDA_SUBJECT", module.__name__)
    assert load_subject().name == module.__name__
    monkeypatch.delenv("KDA_SUBJECT")
    assert load_subject().name == "kda"


@pytest.mark.parametrize(
    "attribute, complaint",
    [("nothing", "has no attribute nothing"), ("number", "has none of"), ("stranger", "arguments are not those")],
)
def test_what_is_no_subject_is_refused(module, attribute, complaint):
    module.number, module.stranger = 3, lambda x, y: x
    with pytest.raises(ValueError, match=complaint):
        load_subject(f"{module.__name__}:{attribute}")


@pytest.mark.parametrize(
    "changes, missing",
    [
        ({"l2norm": True}, "use_qk_l2norm_in_kernel"),
        ({"packed": True}, "cu_seqlens"),
        ({"v_first": True}, "state_v_first"),
        ({"intermediates": True}, "return_intermediate_states"),
        ({"gate": "lower_bound", "lower_bound": -5.0, "g": "gauss"}, "use_gate_in_kernel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_argument_is_not_covered(changes, missing):
    (route, _) = reversed(signature_subject("x", {"chunk": chunk_like}).routes)
    assert route.lacks(PLAIN) is None
    problem = Problem(**{**vars(PLAIN), **changes})
    assert missing in route.lacks(problem)
    with pytest.raises(NotCovered, match=missing):
        call(route, materialise(problem))


def test_safe_gate_is_asked_of_chunk_routes_only():
    problem = Problem(**{**vars(PLAIN), "safe_gate": True, "entry": "recurrent"})
    (route,) = signature_subject("x", {"recurrent": recurrent_like}).routes
    assert route.lacks(problem) is None


def test_a_route_without_gradients_is_held_to_its_outputs(tmp_path):
    recurrent_like.differentiable = False
    subject = signature_subject("x", {"recurrent": recurrent_like})
    problem = Problem(**{**vars(PLAIN), "entry": "recurrent"})
    checked = Runner(subject, "cpu", tmp_path, isolated=False).check("recurrent", problem)
    assert {verdict.quantity: verdict.klass for verdict in checked.verdicts} == {"o": "OK", "ht": "OK"}
    assert {"dq", "dk", "dv", "dg", "dbeta"} == checked.missing


def test_own_routes_prove_that_they_ran(monkeypatch):
    route = load_subject("kda").route("torch", "chunk")
    assert call(route, materialise(PLAIN)).outputs["o"].shape == (1, 4, 1, 4)
    monkeypatch.setattr(kda, "force_route", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(kda, "record_launches", lambda: contextlib.nullcontext([]))
    with pytest.raises(RouteDidNotRun, match="shows nothing"):
        call(route, materialise(PLAIN))


def test_bits_are_compared_with_nan_and_signed_zero():
    x = torch.tensor([0.0, float("nan"), 1.0])
    assert differing_bytes(x, x.clone()) == 0
    assert differing_bytes(x, torch.tensor([-0.0, float("nan"), 1.0])) == 1
    assert differing_bytes(x.expand(2, 3), x.repeat(2, 1)) == 0


def test_a_route_that_refuses_is_not_covered_and_no_crash(monkeypatch, tmp_path):
    """What only a verifier knows (a device, a driver) is no fault of the kernel."""
    route = replace(registry.route_named("torch"), verify=lambda call: "not here")
    monkeypatch.setitem(registry._registry, "torch", route)
    checked = Runner(load_subject("kda"), "cpu", tmp_path).check("torch", Problem())
    assert [(v.klass, "not here" in v.message) for v in checked.verdicts] == [("NOT_COVERED", True)]


def test_a_call_that_changes_its_inputs_changes_them_for_nobody_else(tmp_path):
    """A check makes its tensors once; those that a call wrote to are made anew for the next call and for the oracle."""
    runner = Runner(load_subject("tests.harness.subjects:vandal"), "cpu", tmp_path, isolated=False)
    problem = replace(PLAIN, safe_gate=True)
    for _ in range(2):
        checked = runner.check("chunk-safe_gate", problem, repeat=True)
        assert [str(v.quantity) for v in checked.verdicts if v.klass != "OK"] == ["inputs"]
        first, again = checked.runs
        assert all(torch.equal(first[name], again[name]) for name in first)
