"""The gradients of the fused chunk routes against the oracle, for every option, and what they promise beyond values."""

from dataclasses import replace

import pytest
import torch

import kda
from harness import interpreter, verdict
from harness.bits import differing_bytes
from harness.call import DIFFERENTIABLE, keywords
from harness.problem import Case, materialise
from kda import fused, fused_fwd
from tests.kda.test_chunk_fused import (
    BOTH,
    BOUNDED,
    INTERPRETED,
    OPTIONS,
    PLAIN,
    RAW,
    SOFTPLUS,
    TOKENS,
    outputs,
    route_of,
)

TRAINED = replace(PLAIN, loss="both", lengths=(18,))
PACKED = {"lengths": (17, 0, 5), "packed": True, "tail": 3}


def gradients(case: Case, route: str | None = None, keep: bool = False, **changes) -> dict[str, torch.Tensor]:
    """Every gradient on a fused route, by quantity; `changes` replace inputs of the case. `keep`: what the forward pass
    made is not made again.
    """
    inputs = {**case.inputs, **changes}
    leaves = {name: inputs[name].detach().requires_grad_() for name in DIFFERENTIABLE if inputs.get(name) is not None}
    words = keywords(case, "chunk") | {"cu_seqlens": inputs.get("cu_seqlens"), "disable_recompute": keep}
    with kda.force_route(route or route_of(case.problem)):
        o, ht = kda.chunk_kda(**leaves, **words)
    roots = [(x, inputs[d]) for x, d in ((o, "do"), (ht, "dht")) if x is not None and inputs.get(d) is not None]
    found = torch.autograd.grad([x for x, _ in roots], list(leaves.values()), [d for _, d in roots])
    return {DIFFERENTIABLE[name]: x for name, x in zip(leaves, found)}


def judged(case: Case, got: dict[str, torch.Tensor]) -> list[str]:
    spec, quantities = fused.PRECISION[route_of(case.problem)], case.problem.quantities() - {"o", "ht"}
    verdicts = verdict.judge(case.inputs, case.options, got, entry="chunk", spec=spec, quantities=quantities)
    assert {v.quantity for v in verdicts} == quantities
    return [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ, for the quantities that do."""
    return {name: n for name in a if (n := differing_bytes(a[name], b[name]))}


def case_of(route: str, device: str, **changes) -> Case:
    return materialise(replace(TRAINED, **{"safe_gate": route == fused.SAFE_GATE, **changes}), device)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_gradients(changes, device):
    problem = replace(PLAIN, loss="both" if changes.get("final_state", True) else "o", **changes)
    case = materialise(problem, device)
    assert judged(case, gradients(case)) == []


@BOTH
@pytest.mark.parametrize("loss", ["o", "state"])
def test_gradients_of_one_result_alone(route, loss, device):
    case = case_of(route, device, loss=loss, group=2)
    assert judged(case, gradients(case)) == []


@BOTH
def test_sequences_may_end_anywhere_in_a_chunk(route, device):
    case = case_of(route, device, lengths=(5, 31, 0, 32, 33), packed=True, tail=2)
    assert judged(case, gradients(case)) == []


@BOTH
def test_the_record_has_the_kernels_of_the_backward_pass(route, device):
    case = case_of(route, device, **RAW, **(BOUNDED if route == fused.SAFE_GATE else SOFTPLUS))
    with kda.record_launches() as launches:
        gradients(case)
    assert {launch.route for launch in launches} == {route}
    assert [launch.kernel for launch in launches] == [
        *("kda_fused_prep_kernel", "kda_fused_scan_kernel") * 2,
        *("kda_fused_scan_bwd_kernel", "kda_fused_chunk_bwd_kernel"),
        *["kda_sum_slots_kernel"] * 2,
    ]


@BOTH
@pytest.mark.parametrize("changes", [{}, PACKED, {"scale": 0.0}], ids=["dense", "packed", "no_scale"])
def test_disable_recompute_changes_no_bit(route, changes, device):
    case = case_of(route, device, group=2, **changes, **RAW, **(BOUNDED if route == fused.SAFE_GATE else SOFTPLUS))
    with kda.record_launches() as launches:
        kept = gradients(case, keep=True)
    names = [launch.kernel for launch in launches]
    assert [names.count(f"kda_fused_{name}_kernel") for name in ("prep", "scan", "scan_bwd", "chunk_bwd")] == [1] * 4
    assert differing(kept, gradients(case)) == {}


@BOTH
def test_outputs_are_the_same_whatever_is_kept_beside_them(route, device):
    case = case_of(route, device, **PACKED)
    without, training = (
        outputs(case),
        outputs(case, q=case.inputs["q"].detach().requires_grad_(), disable_recompute=True),
    )
    assert training["o"].requires_grad
    assert differing(without, {name: x.detach() for name, x in training.items()}) == {}


@BOTH
def test_diagonal_gives_the_gate_no_gradient(route, device):
    """One token without a state before it: nothing decays, so its gate has gradient 0, and not a rounding error."""
    case = case_of(route, device, lengths=(1,), initial_state=False, g="bound")
    assert gradients(case)["dg"].count_nonzero() == 0


def test_reset_is_exact(device):
    """-inf and -1e6 are the same reset, bit by bit, and its gradient is exactly 0."""
    case = case_of(fused.UNBOUNDED, device, g="resets")
    reset = case.inputs["g"] == -torch.inf
    got = gradients(case)
    assert bool(reset.any()) and got["dg"][reset].count_nonzero() == 0
    assert differing(got, gradients(case, g=case.inputs["g"].clamp(min=-1e6))) == {}


@BOTH
@pytest.mark.parametrize("split", [13, 16])
def test_gradients_are_bitwise_causal(route, split, device):
    """New values of everything from one token on: gradients of a loss on the tokens before keep their bits there."""
    case, other = case_of(route, device), case_of(route, device, seed=1)
    do = case.inputs["do"].clone()
    do[:, split:] = 0
    loss = {"do": do, "dht": torch.zeros_like(case.inputs["dht"])}
    changed = {n: torch.cat([case.inputs[n][:, :split], other.inputs[n][:, split:]], 1) for n in TOKENS}
    cut = lambda got: {n: x if n == "dh0" else x[:, :split] for n, x in got.items()}  # noqa: E731
    before, after = gradients(case, route, **loss), gradients(case, route, **loss, **changed)
    assert differing(cut(before), cut(after)) == {}
    assert differing_bytes(before["dv"][:, split:], case.inputs["v"][:, split:]) > 0


@BOTH
def test_sequences_keep_their_bits_alone_in_a_batch_and_packed(route, device):
    case = case_of(route, device, lengths=(21, 21), heads=2)
    together, names = gradients(case), (*TOKENS, "do")
    for n in range(2):
        alone = {name: case.inputs[name][n : n + 1] for name in (*names, "initial_state", "dht")}
        assert differing(gradients(case, route, **alone), {name: x[n : n + 1] for name, x in together.items()}) == {}
    flat = {name: case.inputs[name].flatten(0, 1)[None] for name in names}
    packed = gradients(case, route, **flat, cu_seqlens=torch.tensor([0, 21, 42], device=device))
    expected = {name: x if name == "dh0" else x.flatten(0, 1)[None] for name, x in together.items()}
    assert differing(packed, expected) == {}


@BOTH
def test_nan_stays_in_its_sequence(route, device):
    """NaN in every token of one sequence and in the unused tail: the neighbours keep their bits, the tail is 0."""
    case = case_of(route, device, lengths=(17, 5, 18), packed=True, tail=3)
    spoilt = {name: case.inputs[name].clone() for name in (*TOKENS, "do")}
    for x in spoilt.values():
        x[:, 17:22] = torch.nan
        x[:, 40:] = torch.nan
    before, after = gradients(case), gradients(case, route, **spoilt)
    kept = [*range(17), *range(22, 40)]
    cut = lambda got: {n: x[[0, 2]] if n == "dh0" else x[:, kept] for n, x in got.items()}  # noqa: E731
    assert differing(cut(before), cut(after)) == {}
    assert all(bool(after[f"d{name}"][:, 17:22].isnan().all()) for name in ("q", "k", "v", "beta"))
    assert all(after[f"d{name}"][:, 40:].count_nonzero() == 0 for name in TOKENS)


@BOTH
@pytest.mark.parametrize("exponent", [-24, 24])
def test_values_of_any_size_fit_beside_the_shift(route, exponent, device):
    """v, the state and the incoming gradients times powers of two scale every gradient by powers of two."""
    c = 2.0**exponent
    case = case_of(route, device, g="bound")
    scaled = {name: case.inputs[name] * c for name in ("v", "initial_state", "do", "dht")}
    powers = {"dv": 1, "dh0": 1}
    expected = {name: x * c ** powers.get(name, 2) for name, x in gradients(case).items()}
    assert differing(expected, gradients(case, route, **scaled)) == {}


@BOTH
def test_descriptors_read_what_pointers_read(route, device, monkeypatch):
    """The scans by tensor descriptors, which TMA serves, against the same by pointers; full chunks, tails, no chunk."""
    case = case_of(route, device, lengths=(33, 0, 5, 16), packed=True, tail=2, group=2)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 90)
    by_descriptors = gradients(case)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 80)
    assert differing(by_descriptors, gradients(case)) == {}


@BOTH
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter's sanitizer")
@pytest.mark.parametrize("arch", [80, 90], ids=["pointers", "descriptors"])
def test_kernels_are_clean_under_sanitizer_in_any_program_order(route, arch, device, monkeypatch):
    case = case_of(route, device, **PACKED, group=2, v_first=True)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: arch)
    expected = gradients(case)
    with interpreter.sanitize():
        assert differing(expected, gradients(case)) == {}
    with interpreter.shuffle(7):
        assert differing(expected, gradients(case)) == {}


@BOTH
def test_strided_gradients_are_read_as_they_are(route, device):
    """do and dht as views with gaps, do at an address that TMA cannot take."""
    case = case_of(route, device, **PACKED)
    gapped = lambda x: torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]  # noqa: E731
    do = case.inputs["do"]
    shifted = torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape)
    expected = gradients(case)
    assert differing(expected, gradients(case, do=gapped(do), dht=gapped(case.inputs["dht"]))) == {}
    assert differing(expected, gradients(case, do=shifted)) == {}
