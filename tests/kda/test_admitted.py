"""Calls like earlier ones: validated and routed once, and refused all the same when anything that matters differs."""

import pytest
import torch

import kda
from kda import admitted, contract, ops, registry
from kda.contract import Call


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(admitted, "_routes", {})


def arguments(**changes: object) -> dict[str, object]:
    rows = lambda *shape: torch.linspace(-1, 1, torch.Size((1, 4, *shape)).numel()).view(1, 4, *shape)  # noqa: E731
    made = {"q": rows(2, 4), "k": rows(2, 4), "v": rows(2, 3), "g": -rows(2, 4).abs(), "beta": rows(2)}
    return {**made, "scale": 1.0, "output_final_state": True, **changes}


def packed(*offsets: int) -> dict[str, object]:
    return arguments(cu_seqlens=torch.tensor(offsets, dtype=torch.int32))


@pytest.fixture
def validations(monkeypatch):
    """The calls that were validated."""
    seen, validate = [], contract.validate
    monkeypatch.setattr(ops.contract, "validate", lambda call: seen.append(call) or validate(call))
    return seen


@pytest.mark.parametrize("entry", [kda.chunk_kda, kda.fused_recurrent_kda], ids=["chunk", "recurrent"])
def test_a_call_like_an_earlier_one_is_not_validated_again(entry, validations):
    first, again = (entry(**arguments()) for _ in range(2))
    assert len(validations) == 1
    assert all(map(torch.equal, first, again))


def test_other_values_of_tensors_are_the_same_call(validations):
    kda.chunk_kda(**arguments())
    changed = arguments(q=torch.zeros(1, 4, 2, 4))
    assert kda.chunk_kda(**changed)[0].count_nonzero() == 0
    assert len(validations) == 1


def test_whole_numbers_are_made_floats_every_time():
    raw = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
    expected = kda.chunk_kda(**arguments(**raw, scale=2.0, lower_bound=-3.0))
    for _ in range(2):
        got = kda.chunk_kda(**arguments(**raw, scale=2, lower_bound=-3))
        assert all(map(torch.equal, expected, got))


WRONG = {
    "scale_is_bool": {"scale": True},
    "scale_is_nan": {"scale": float("nan")},
    "flag_is_a_number": {"output_final_state": 1},
    "flag_is_a_list": {"safe_gate": []},
    "chunk_is_a_float": {"chunk_size": 64.0},
    "q_is_a_list": {"q": [1.0]},
    "q_is_half": {"q": torch.zeros(1, 4, 2, 4, dtype=torch.float16)},
    "k_is_sparse": {"k": torch.zeros(1, 4, 2, 4).to_sparse()},
    "k_is_wider": {"k": torch.zeros(1, 4, 2, 5)},
    "v_is_elsewhere": {"v": torch.zeros(1, 4, 2, 3, device="meta")},
    "parameters_without_gate": {"A_log": torch.zeros(2)},
    "state_is_smaller": {"initial_state": torch.zeros(1, 2, 4, 2)},
    "precision": {"precision": "fp8"},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_refused_call_is_refused_after_a_legal_one_as_before_it(change):
    def refusal() -> tuple[type, str]:
        with pytest.raises((TypeError, ValueError)) as caught:
            kda.chunk_kda(**arguments(**change))
        return caught.type, str(caught.value)

    before = refusal()
    kda.chunk_kda(**arguments())
    assert admitted._routes
    assert [refusal(), refusal()] == [before, before]


def test_offsets_are_read_in_every_call():
    kda.chunk_kda(**packed(0, 2, 4))
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 1; it must be at least cu_seqlens\[1\] = 2"):
        kda.chunk_kda(**packed(0, 2, 1))


def test_values_are_read_as_soon_as_they_shall_be(monkeypatch):
    broken = arguments(q=torch.full((1, 4, 2, 4), torch.nan))
    kda.chunk_kda(**broken)
    monkeypatch.setenv("KDA_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"q\[0, 0, 0, 0\] is nan; it must be finite"):
        kda.chunk_kda(**broken)


def test_transforms_are_refused_in_every_call():
    kda.chunk_kda(**arguments())
    with pytest.raises(TypeError, match=r"q is under a torch\.func transform"):
        torch.func.grad(lambda x: kda.chunk_kda(**arguments(), initial_state=None)[0].sum() + x)(torch.zeros(()))


def ran() -> str:
    with kda.record_launches() as launches:
        kda.chunk_kda(**arguments())
    (route,) = {launch.route for launch in launches}
    return route


@pytest.mark.skipif(not registry.INTERPRETED, reason="on CPU tensors, one route takes the call")
def test_routes_that_are_forced_or_forbidden_later_are_heeded(monkeypatch):
    chosen = ran()
    assert chosen != "torch" and ran() == chosen
    with kda.force_route("torch"):
        assert ran() == "torch"
        with kda.force_route("recurrent"):
            assert ran() == "recurrent"
    with kda.forbid_routes(chosen):
        assert ran() != chosen
    monkeypatch.setenv("KDA_FORCE_ROUTE", "torch")
    assert ran() == "torch"
    monkeypatch.setenv("KDA_FORCE_ROUTE", "no such route")
    with pytest.raises(ValueError, match="KDA_FORCE_ROUTE is 'no such route'"):
        kda.chunk_kda(**arguments())
    monkeypatch.delenv("KDA_FORCE_ROUTE")
    monkeypatch.setenv("KDA_FORBID_ROUTES", chosen)
    assert ran() != chosen


def test_a_call_that_was_admitted_still_explains_itself():
    kda.chunk_kda(**arguments())
    assert kda.explain("chunk_kda", **arguments()).route == ran()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(admitted, "MOST", 2)
    for tokens in range(1, 6):
        made = {name: x[:, :1].expand(1, tokens, *x.shape[2:]) for name, x in arguments().items() if torch.is_tensor(x)}
        kda.chunk_kda(**made)
        assert 1 <= len(admitted._routes) <= 2


def test_a_call_with_other_arguments_has_the_rest():
    call = Call("chunk", **arguments())
    other = call.but(q=call.k)
    assert type(other) is Call and other.q is call.k and call.q is not call.k
    assert all(getattr(other, name) is getattr(call, name) for name in Call.__dataclass_fields__ if name != "q")
