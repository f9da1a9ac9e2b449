"""Problems: written down and read back, the same tensors everywhere, and nothing hostile gets in."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.families import FAMILIES, family
from harness.problem import Edit, Problem, materialise
from harness.strategies import problems

EXAMPLES = [(f.name, i, p) for f in FAMILIES for i, p in enumerate(f.examples)]
ANY_PROBLEM = st.sampled_from([f for f in FAMILIES if not f.gpu_only]).flatmap(lambda f: problems(f, f.entries[0]))


@pytest.mark.parametrize("problem", [p for *_, p in EXAMPLES], ids=[f"{name}-{i}" for name, i, _ in EXAMPLES])
def test_examples_round_trip(problem):
    assert eval(repr(problem)) == problem
    assert Problem.from_json(problem.to_json({"class": "BUG"})) == problem


@given(ANY_PROBLEM)
def test_generated_problems_round_trip_and_materialise(problem):
    assert eval(repr(problem)) == problem
    assert Problem.from_json(problem.to_json()) == problem
    case = materialise(problem)
    again = materialise(problem)
    for name, x in case.inputs.items():
        assert torch.equal(x.nan_to_num(), again.inputs[name].nan_to_num()), name


def test_edits_round_trip_and_apply():
    problem = Problem(lengths=(3,), K=2, V=2, edits=(Edit("v", (1, 0, 1), 7.5), Edit("g", (2, 0, 0), float("-inf"))))
    assert Problem.from_json(problem.to_json()) == problem
    inputs = materialise(problem).inputs
    assert inputs["v"][0, 1, 0, 1] == 7.5
    assert inputs["g"][0, 2, 0, 0] == float("-inf")


def test_changing_one_tensor_reshuffles_no_other():
    base = Problem(lengths=(5,), K=4, V=4, q="gauss", k="unit", v="gauss", g="mild", beta="uniform", do="gauss")
    before, after = materialise(base).inputs, materialise(dataclasses.replace(base, v="ramp", seed=0)).inputs
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"v"}


def test_values_are_the_same_on_every_machine():
    """Another generator, or another order of streams, would silently change every stored counterexample."""
    inputs = materialise(Problem(lengths=(1,), K=2, V=2, q="gauss", v="gauss", seed=3)).inputs
    expected = {"q": [2.4171500205993652, 0.14276257157325745], "v": [0.8538944125175476, 0.04479672759771347]}
    assert {name: inputs[name].flatten().tolist() for name in expected} == expected


def mutated(**fields) -> str:
    document = json.loads(Problem().to_json())
    document["problem"] |= fields
    return json.dumps(document)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "cannot be read"),
        ('{"schema": 1, "problem": {"lengths": [1', "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"schema": 2, "problem": {}}', "must be"),
        ("[]", "must be"),
        (mutated(colour="red"), "unknown fields: 'colour'"),
        (mutated(lengths=[10**9]), "Problem.lengths"),
        (mutated(lengths="abc"), "Problem.lengths"),
        (mutated(lengths=[-1]), "Problem.lengths"),
        (mutated(K=10**6), "Problem.K"),
        (mutated(heads=True), "Problem.heads"),
        (mutated(q="__import__('os')"), "Problem.q"),
        (mutated(q=["ones"]), "Problem.q"),
        (mutated(lower_bound=0.5), "Problem.lower_bound"),
        (mutated(edits=[{"tensor": "q"}]), "wrong kind"),
        (mutated(edits=[{"tensor": "os", "index": [0], "value": 1}]), "Edit.tensor"),
        ("x" * (2**20 + 1), "at most"),
    ],
    ids=lambda value: None if len(str(value)) > 60 else str(value)[:30],
)
def test_hostile_json_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Problem.from_json(text)


def test_every_family_says_what_only_it_sees():
    assert len({f.sees for f in FAMILIES}) == len(FAMILIES)
    assert family("ragged").name == "ragged"
    with pytest.raises(ValueError, match="family is 'nothing'"):
        family("nothing")
