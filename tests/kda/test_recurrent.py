"""What the recurrent kernels promise beyond values: bits independent of the future, neighbours, layout and luck."""

import contextlib

import pytest
import torch
import triton

import kda
from harness import interpreter
from harness.bits import differing_bytes
from harness.problem import Problem, materialise
from harness.subject import DIFFERENTIABLE, keywords

GRADIENTS = ("q", "k", "v", "g", "beta")
INTERPRETED = triton.knobs.runtime.interpret
MIXED = Problem(
    lengths=(12,),
    heads=2,
    group=2,
    K=8,
    V=12,
    l2norm=True,
    beta_sigmoid=True,
    gate="softplus",
    A_log="gauss",
    dt_bias="gauss",
    initial_state=True,
    q="gauss",
    k="gauss",
    v="gauss",
    g="gauss",
    beta="gauss",
    h0="gauss",
    do="gauss",
    dht="gauss",
)
BOUNDED = {"gate": "lower_bound", "lower_bound": -5.0}
PREGATED = {"gate": "pregated", "A_log": None, "dt_bias": None, "g": "resets"}
MODES = {
    "softplus-fp32": MIXED,
    "lower_bound-bf16-v_first": Problem(**{**vars(MIXED), **BOUNDED, "dtype": "bf16", "v_first": True}),
    "pregated-fp16": Problem(**{**vars(MIXED), **PREGATED, "dtype": "fp16"}),
}


def run(
    problem: Problem,
    device: str,
    entry: str = "fused_recurrent_kda",
    route: str = "recurrent",
    **changes: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Outputs and gradients by argument name; `changes` replace tensors of the problem."""
    case = materialise(problem, device)
    tensors = {**case.inputs, **changes}
    leaves = {n: tensors[n].detach().requires_grad_() for n in DIFFERENTIABLE if tensors.get(n) is not None}
    words = keywords(case, "recurrent") | {"cu_seqlens": tensors.get("cu_seqlens")}
    with kda.force_route(route):
        o, ht = getattr(kda, entry)(**leaves, **words)[:2]
    roots = [(x, tensors[d]) for x, d in ((o, "do"), (ht, "dht")) if tensors.get(d) is not None]
    grads = torch.autograd.grad([x for x, _ in roots], list(leaves.values()), [d for _, d in roots])
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(leaves, grads))}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ, for the quantities that do."""
    return {name: n for name in a if (n := differing_bytes(a[name], b[name]))}


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
def test_recurrent_repeats_bitwise(problem, device):
    assert differing(run(problem, device), run(problem, device)) == {}


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
def test_recurrent_future_does_not_reach_the_past(problem, device):
    """New values from token 8 on: the prefix of o, and of the gradients of a loss on the prefix, keep their bits."""
    split, inputs = 8, materialise(problem, device).inputs
    do = inputs["do"].clone()
    do[:, split:] = 0
    changes = {"do": do, "dht": torch.zeros_like(inputs["dht"])}
    other = dict(changes)
    for name in GRADIENTS:
        other[name] = inputs[name].clone()
        other[name][:, split:] = other[name][:, split:].flip(1) * 0.5
    before, after = run(problem, device, **changes), run(problem, device, **other)
    prefix = lambda result: {name: result[name][:, :split] for name in ("o", *GRADIENTS)}  # noqa: E731
    assert differing(prefix(before), prefix(after)) == {}
    assert differing_bytes(before["initial_state"], after["initial_state"]) == 0
    assert differing_bytes(before["o"], after["o"]) > 0


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
def test_recurrent_alone_packed_and_batched_agree_bitwise(problem, device):
    """One sequence of 12 tokens: alone, as the second row of a batch, and packed between others with an unused tail."""
    inputs = materialise(problem, device).inputs
    alone = run(problem, device)
    along = [*GRADIENTS, "do"]
    states = ["initial_state", "dht"]

    noise = {name: inputs[name].flip(1) for name in along} | {name: inputs[name].flip(1) for name in states}
    batched = run(problem, device, **{n: torch.cat([noise[n], inputs[n]]) for n in along + states})
    row = {name: batched[name][1:] for name in ("o", "ht", "initial_state", *GRADIENTS)}
    assert differing(row, {name: alone[name] for name in row}) == {}

    offsets = torch.tensor([0, 5, 5, 17], device=device)
    packed = {n: torch.cat([noise[n][:, :5], inputs[n], noise[n][:, :3]], 1) for n in along}
    packed |= {n: torch.cat([noise[n], noise[n], inputs[n]]) for n in states}
    result = run(problem, device, **packed, cu_seqlens=offsets)
    middle = {name: result[name][:, 5:17] for name in ("o", *GRADIENTS)}
    middle |= {"ht": result["ht"][2:], "initial_state": result["initial_state"][2:]}
    assert differing(middle, {name: alone[name] for name in middle}) == {}
    assert all(bool((result[name][:, 17:] == 0).all()) for name in ("o", *GRADIENTS))
    assert torch.equal(result["ht"][1], noise["initial_state"][0]), "an empty sequence passes its state through"
    assert torch.equal(result["initial_state"][1], noise["dht"][0]), "and its gradient"


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
def test_recurrent_nan_stays_in_its_sequence_and_its_head(problem, device):
    """NaN in sequence 1, and everywhere in query head 1: the rest keeps its bits."""
    inputs = materialise(problem, device).inputs
    along, states = [*GRADIENTS, "do"], ["initial_state", "dht"]
    clean = {n: torch.cat([inputs[n]] * 3) for n in states} | {"cu_seqlens": torch.tensor([0, 4, 8, 12], device=device)}
    dirty = clean | {n: inputs[n].clone() for n in along} | {n: clean[n].clone() for n in states}
    for name in along:
        dirty[name][:, 4:8] = torch.nan
        dirty[name][:, :, inputs[name].shape[2] // 2 :] = torch.nan
    for name in states:
        dirty[name][1] = torch.nan

    def healthy(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = {name: result[name].unflatten(2, (2, -1))[:, :, 0] for name in ("o", *GRADIENTS)}
        found = {f"{name}[{a}:{b}]": x[:, a:b] for name, x in rows.items() for a, b in ((0, 4), (8, 12))}
        return found | {name: result[name][::2, :2] for name in ("ht", "initial_state")}

    assert differing(healthy(run(problem, device, **clean)), healthy(run(problem, device, **dirty))) == {}


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
@pytest.mark.parametrize("route", ["recurrent", "torch"])
def test_recurrent_unused_tail_may_hold_nan(route, problem, device):
    """Its outputs and gradients are 0, and no gradient of a parameter hears of it."""
    offsets = {"cu_seqlens": torch.tensor([0, 9], device=device)}
    inputs = materialise(problem, device).inputs
    dirty = {name: inputs[name].clone() for name in (*GRADIENTS, "do")}
    for x in dirty.values():
        x[:, 9:] = torch.nan
    expected, got = (run(problem, device, route=route, **offsets, **changes) for changes in ({}, dirty))
    assert differing(expected, got) == {}
    assert not any(bool(got[name][:, 9:].any()) for name in ("o", *GRADIENTS))


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values at an odd offset, every second element of a longer row."""
    room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0, device=x.device).to(x.dtype)
    room[..., 1::2] = x
    return room[..., 1::2]


def test_recurrent_layouts_agree_bitwise(device):
    inputs = {n: x for n, x in materialise(MIXED, device).inputs.items() if x is not None}
    assert differing(run(MIXED, device), run(MIXED, device, **{n: strided(x) for n, x in inputs.items()})) == {}


def test_recurrent_expanded_gradients(device):
    """o.sum() and ht.sum() hand the kernel gradients of stride 0."""
    ones = {n: torch.ones(1, device=device).expand_as(materialise(MIXED, device).inputs[n]) for n in ("do", "dht")}
    dense = {n: x.contiguous() for n, x in ones.items()}
    assert differing(run(MIXED, device, **dense), run(MIXED, device, **ones)) == {}


def test_recurrent_inputs_are_not_modified(device):
    inputs = {n: x for n, x in materialise(MIXED, device).inputs.items() if x is not None}
    before = {n: x.clone() for n, x in inputs.items()}
    run(MIXED, device, **inputs)
    assert differing(before, inputs) == {}


@pytest.mark.parametrize("loss", ["o", "state"])
def test_recurrent_missing_gradient_is_a_zero_gradient(loss, device):
    """A loss on one output alone gives the bits of a zero gradient for the other."""
    absent = "dht" if loss == "o" else "do"
    zero = torch.zeros_like(materialise(MIXED, device).inputs[absent])
    assert differing(run(MIXED, device, **{absent: zero}), run(MIXED, device, **{absent: None})) == {}


def test_recurrent_offsets_of_either_width_agree_bitwise(device):
    states = {n: materialise(MIXED, device).inputs[n].repeat(2, 1, 1, 1) for n in ("initial_state", "dht")}
    narrow, wide = (torch.tensor([0, 5, 12], dtype=d, device=device) for d in (torch.int32, torch.int64))
    assert (
        differing(run(MIXED, device, **states, cu_seqlens=narrow), run(MIXED, device, **states, cu_seqlens=wide)) == {}
    )


def test_recurrent_through_chunk_kda_agrees_bitwise(device):
    """chunk_size is 64 in both, so that even the recomputed states are the same."""
    assert differing(run(MIXED, device), run(MIXED, device, entry="chunk_kda")) == {}


@pytest.mark.parametrize(
    "B, T, offsets",
    [(0, 5, None), (2, 0, None), (1, 5, [0]), (1, 0, [0, 0]), (1, 0, [0])],
    ids=["no_batch", "no_tokens", "varlen-no_sequences", "varlen-no_tokens", "varlen-nothing"],
)
@pytest.mark.parametrize("route", ["recurrent", "torch"])
def test_recurrent_of_nothing(route, B, T, offsets, device):
    """Empty outputs, states passed through, gradients zero."""
    H, K, V = 2, 4, 3
    N = B if offsets is None else len(offsets) - 1
    leaf = lambda *shape: torch.ones(*shape, device=device).requires_grad_()  # noqa: E731
    call = {"q": leaf(B, T, H, K), "k": leaf(B, T, H, K), "v": leaf(B, T, H, V), "g": leaf(B, T, H, K)}
    call |= {"beta": leaf(B, T, H), "initial_state": leaf(N, H, K, V)}
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    with kda.force_route(route):
        o, ht, h = kda.chunk_kda(
            **call, output_final_state=True, return_intermediate_states=True, cu_seqlens=cu_seqlens
        )
    assert o.shape == (B, T, H, V) and h.shape == (B, 1 if T and offsets is None else 0, H, K, V)
    grads = torch.autograd.grad(o.sum() + ht.sum(), list(call.values()), materialize_grads=True)
    assert torch.equal(ht, call["initial_state"]) and not bool(o.any())
    assert torch.equal(grads[-1], torch.ones_like(ht))
    assert not any(bool(grad.any()) for grad in grads[:-1])


def test_recurrent_empty_sequence_without_a_state_ends_in_zeros(device):
    changes = {"initial_state": None, "cu_seqlens": torch.tensor([0, 0, 12], device=device)}
    dht = torch.ones(2, 4, 8, 12, device=device)
    assert not bool(run(MIXED, device, dht=dht, **changes)["ht"][0].any())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on the CPU such offsets are refused")
def test_recurrent_wild_offsets_stay_in_bounds():
    """Offsets that only the device knows cannot be refused; they are clamped, and rows of no sequence stay zero."""
    wild = torch.tensor([-5, 5, 2, 1000], device="cuda")
    tame = torch.tensor([0, 5, 5, 12], device="cuda")
    states = {n: materialise(MIXED, "cuda").inputs[n].repeat(3, 1, 1, 1) for n in ("initial_state", "dht")}
    assert differing(run(MIXED, "cuda", **states, cu_seqlens=wild), run(MIXED, "cuda", **states, cu_seqlens=tame)) == {}


def test_recurrent_keeps_states_only_for_a_backward_pass(device, monkeypatch):
    """Under no_grad, and for inputs without gradient, no state but the last is stored."""
    kept = []
    launch = kda.fused_recurrent._recurrent_forward
    monkeypatch.setattr(kda.fused_recurrent, "_recurrent_forward", lambda c, keep: kept.append(keep) or launch(c, keep))
    inputs = materialise(Problem(lengths=(3,)), device).inputs
    call = {name: inputs[name] for name in GRADIENTS}
    training = {**call, "q": call["q"].clone().requires_grad_()}
    with kda.force_route("recurrent"):
        kda.chunk_kda(**call)
        kda.chunk_kda(**training)
        with torch.no_grad():
            kda.chunk_kda(**training)
    assert kept == [False, True, False]


def test_recurrent_intermediate_states_carry_no_gradient(device):
    inputs = materialise(Problem(lengths=(3,)), device).inputs
    call = {name: inputs[name].clone().requires_grad_() for name in GRADIENTS}
    with kda.force_route("recurrent"):
        o, _, h = kda.chunk_kda(**call, return_intermediate_states=True)
    assert o.requires_grad and not h.requires_grad


@pytest.mark.parametrize("problem", MODES.values(), ids=MODES)
@pytest.mark.parametrize("guard", ["sanitize", "poison", "shuffle"])
def test_recurrent_memory(guard, problem, device):
    """Ragged packing under the memory checks, on memory full of NaN, in another program order: always the same bits."""
    if guard != "poison" and not INTERPRETED:
        pytest.skip("a tool of the interpreter")
    inputs = materialise(problem, device).inputs
    changes = {n: inputs[n].repeat(3, 1, 1, 1) for n in ("initial_state", "dht")}
    changes["cu_seqlens"] = torch.tensor([0, 5, 5, 10], device=device)
    contexts = {"sanitize": interpreter.sanitize, "poison": poisoned, "shuffle": lambda: interpreter.shuffle(5)}
    expected = run(problem, device, **changes)
    with contexts[guard]():
        got = run(problem, device, **changes)
    assert differing(expected, got) == {}
    assert not any(bool(x.isnan().any()) for x in got.values())


@contextlib.contextmanager
def poisoned():
    """torch.empty returns NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
