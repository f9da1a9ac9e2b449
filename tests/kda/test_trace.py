"""Shown stages: those of dense and strided tensors are the same, calls show them only while somebody looks."""

from dataclasses import replace

import pytest
import torch

import kda
from harness.call import DIFFERENTIABLE, call, keywords
from harness.problem import Problem, materialise
from harness.subject import own_subject
from kda import contract, trace
from kda.chunk_stages import chunk_stages
from kda.contract import Call

RANDOM = {"q": "unit", "v": "gauss", "g": "mild", "beta": "uniform", "h0": "gauss", "do": "gauss", "dht": "gauss"}
PLAIN = Problem(entry="chunk", lengths=(5, 0, 36), packed=True, tail=2, K=4, V=4, initial_state=True, **RANDOM)
FUSED = replace(PLAIN, K=64, V=64, dtype="bf16")
LOOKED_INTO = {"chunk-unbounded": PLAIN, "fused-unbounded": FUSED, "segment_parallel-unbounded": FUSED}


def spread(x: torch.Tensor) -> torch.Tensor:
    """x as a view with gaps that hold NaN."""
    wide = x.new_full((*x.shape, 3), torch.nan)
    wide[..., 1] = x
    return wide[..., 1]


def shown(route: str, problem: Problem, device: str, form=lambda x: x) -> dict[str, torch.Tensor]:
    case = materialise(problem, device)
    tensors = {name: case.inputs.get(name) for name in DIFFERENTIABLE}
    tensors = {name: None if x is None else form(x) for name, x in tensors.items()}
    words = keywords(case, "chunk") | {"scale": contract.default_scale(tensors["q"], problem.scale)}
    validated = contract.validate(Call("chunk", **tensors, **words))
    with kda.force_route(route):
        return chunk_stages(validated, route, do=form(case.inputs["do"]), dht=form(case.inputs["dht"]))


@pytest.mark.parametrize("route", LOOKED_INTO)
def test_stages_of_strided_tensors_are_those_of_dense_ones(route, device):
    dense, strided = (shown(route, LOOKED_INTO[route], device, *form) for form in ((), (spread,)))
    assert {name for name, x in dense.items() if x is not None and not torch.equal(x, strided[name])} == set()
    assert {"states", "dh", "o", "q"} <= set(dense)


def test_stages_of_an_expanded_gradient_are_those_of_a_dense_one(device):
    """What the sum of o sends back: one number for all."""
    x = materialise(replace(PLAIN, packed=False, lengths=(36, 36), tail=0), device).inputs
    given = Call("chunk", *(x[name] for name in ("q", "k", "v", "g", "beta")), scale=0.5)
    one = torch.ones((), device=device).expand(x["v"].shape)
    expanded, dense = (chunk_stages(given, "chunk-unbounded", do=do) for do in (one, one.contiguous()))
    assert {name for name, got in dense.items() if got is not None and not torch.equal(got, expanded[name])} == set()


@pytest.mark.parametrize("route", LOOKED_INTO)
def test_states_are_k_first_in_a_trace_and_the_callers_in_its_stages(route, device):
    k_first, v_first = (replace(LOOKED_INTO[route], v_first=first) for first in (False, True))
    with trace.traced() as found:
        mine = shown(route, v_first, device)
    case = materialise(v_first, device)
    first = case.inputs["initial_state"].float()
    assert torch.allclose(mine["states"][0], first[0], rtol=2**-7)
    assert torch.equal(found["states"], mine["states"].mT)
    assert shown(route, k_first, device)["states"].shape == mine["states"].shape


@pytest.mark.parametrize("route", [*LOOKED_INTO, "recurrent"])
def test_a_call_shows_forward_and_backward_stages_where_it_has_any_and_nothing_to_nobody(route, device):
    made, case = own_subject().route(route, "chunk"), materialise(LOOKED_INTO.get(route, PLAIN), device)
    with trace.traced() as found:
        assert trace.is_open()
        call(made, case)
    assert not trace.is_open()
    kept = dict(found)
    call(made, case)
    assert found == kept
    wanted = {"offsets", "chunk_offsets"} if route == "recurrent" else {"inverse", "states", "dh"}
    assert wanted <= found.keys()


@pytest.mark.parametrize("route", LOOKED_INTO)
def test_sequences_without_tokens_have_stages_without_a_number(route, device):
    found = shown(route, replace(LOOKED_INTO[route], lengths=(0, 0), tail=0), device)
    assert {"states", "dh"} <= found.keys()
    assert not any(bool(x.any()) for name, x in found.items() if name in ("A_qk", "w", "states", "dh"))


def test_what_is_shown_is_a_copy_and_the_last_one_stays():
    x = torch.zeros(2)
    with trace.traced() as outer, trace.traced() as inner:
        trace.show({"w": x})
        x += 1
        assert outer["w"].tolist() == inner["w"].tolist() == [0, 0]
        trace.show({"w": x})
    assert outer["w"].tolist() == [1, 1]
