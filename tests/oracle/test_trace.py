"""Stage traces: the stages of whole calls, in slots, consistent with the operator's own results and gradients."""

import pytest
import torch

from harness.problem import Problem, materialise
from oracle.chunk_model import ChunkModel
from oracle.operator import evaluate
from oracle.rounding import RandomGrids
from oracle.trace import BACKWARD, FORWARD, FUSED, OF_PIECES, places, trace_stages

RANDOM = {"q": "unit", "v": "gauss", "g": "mild", "beta": "uniform", "h0": "gauss", "do": "gauss", "dht": "gauss"}
PACKED = Problem(lengths=(5, 0, 20), packed=True, tail=3, heads=2, K=3, V=2, initial_state=True, **RANDOM)
MODEL = ChunkModel(chunk=16)


def rows_of(x: torch.Tensor, lengths: tuple[int, ...], chunk: int) -> torch.Tensor:
    """A token-wise stage `[slots, HV, C, D]` back as `[tokens, HV, D]`."""
    out, slot = [], 0
    for length in lengths:
        for start in range(0, length, chunk):
            out.append(x[slot, :, : min(chunk, length - start)].transpose(0, 1))
            slot += 1
    assert slot == len(x)
    return torch.cat(out)


def test_slots_of_a_packed_call_hold_the_stages_of_each_sequence():
    case = materialise(PACKED)
    stages = trace_stages(case.inputs, case.options, MODEL, gradients=True)
    exact = evaluate(case.inputs, case.options)
    assert set(stages) == {*FORWARD, *BACKWARD} - {*FUSED, *OF_PIECES}
    torch.testing.assert_close(stages["states"][0], case.inputs["initial_state"][0].double())
    torch.testing.assert_close(stages["states"][1], case.inputs["initial_state"][2].double())
    last = stages["decay"][2, :, :, None] * stages["states"][2]
    last = last + stages["k_rest"][2].mT @ stages["v_new"][2]
    torch.testing.assert_close(last, exact["ht"][2])
    z = rows_of(stages["z"], PACKED.lengths, 16)
    torch.testing.assert_close(z * case.inputs["beta"][0, :25, :, None], exact["dv"][0, :25])


def test_the_gradient_behind_the_last_chunk_is_that_of_the_final_state():
    case = materialise(PACKED)
    stages = trace_stages(case.inputs, case.options, MODEL, gradients=True)
    torch.testing.assert_close(stages["dh"][0], case.inputs["dht"][0].double())
    torch.testing.assert_close(stages["dh"][2], case.inputs["dht"][2].double())


def test_v_first_swaps_the_states_only():
    plain, swapped = (materialise(Problem(lengths=(20,), K=3, V=2, v_first=first, **RANDOM)) for first in (False, True))
    swapped.inputs["dht"] = plain.inputs["dht"].mT
    a, b = (trace_stages(case.inputs, case.options, MODEL, gradients=True) for case in (plain, swapped))
    for name in a:
        torch.testing.assert_close(b[name].mT if name in ("states", "dh") else b[name], a[name])


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_replicas_lead(gradients):
    case = materialise(Problem(lengths=(3,), K=2, V=2, **RANDOM))
    stages = trace_stages(case.inputs, case.options, MODEL, gradients=gradients, rounding=RandomGrids(4, 0, "cpu"))
    assert stages["A_qk"].shape == (4, 1, 1, 16, 16)
    assert ("dh" in stages) == gradients
    assert float(stages["w"].std(0).max()) > 0


def test_places_of_a_packed_call():
    found = {name: x.tolist() for name, x in places(materialise(PACKED).inputs, 16).items()}
    assert found == {
        "offsets": [0, 5, 5, 25],
        "chunk_offsets": [0, 1, 1, 3],
        "chunk_rows": [0, 5, 21],
        "chunk_counts": [5, 16, 4],
    }


@pytest.mark.parametrize("form, product", [("residual", "response"), ("solved", "A_qk_beta")])
def test_the_other_forms_have_the_same_stages_and_their_own(form, product):
    case = materialise(PACKED)
    plain, other = (
        trace_stages(case.inputs, case.options, ChunkModel(chunk=16, form=name), gradients=True)
        for name in ("wy", form)
    )
    beta = torch.zeros(3, 2, 16).double()
    for slot, (start, count) in enumerate(((0, 5), (5, 16), (21, 4))):
        beta[slot, :, :count] = case.inputs["beta"][0, start : start + count].T.double()
    for name in ("states", "v_new", "dh", "A_qk"):
        torch.testing.assert_close(other[name], plain[name])
    torch.testing.assert_close(other["k_update"], beta[..., None] * plain["k_rest"])
    weighted = plain["A_qk"] * beta[..., None, :]
    torch.testing.assert_close(other[product], weighted @ other["inverse"] if form == "residual" else weighted)


def test_states_and_gradients_of_pieces_are_those_of_their_first_and_last_chunks():
    case = materialise(Problem(lengths=(70, 20), packed=True, K=2, V=2, **RANDOM))
    model = ChunkModel(chunk=16, form="solved", segment=32)
    stages = trace_stages(case.inputs, case.options, model, gradients=True)
    torch.testing.assert_close(stages["piece_states"], stages["states"][[0, 2, 4, 5]])
    torch.testing.assert_close(stages["piece_gradients"], stages["dh"][[1, 3, 4, 6]])
