"""The fused chunk routes against the oracle: every option that they take, every boundary, and what they promise."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton

import kda
from harness import interpreter, verdict
from harness.bits import differing_bytes
from harness.call import keywords
from harness.problem import Case, Problem, materialise
from kda import fused, fused_fwd
from kda.contract import Call
from oracle.operator import evaluate
from oracle.rounding import ToFormat
from oracle.stages import evaluate_chunk

INTERPRETED = triton.knobs.runtime.interpret
BOTH = pytest.mark.parametrize("route", fused.PRECISION)
TOKENS = ("q", "k", "v", "g", "beta")
PLAIN = Problem(
    entry="chunk",
    lengths=(37,),
    K=64,
    V=64,
    dtype="bf16",
    initial_state=True,
    **dict.fromkeys(("q", "k"), "unit"),
    **dict.fromkeys(("v", "h0", "do", "dht"), "gauss"),
    g="mild",
    beta="uniform",
    loss="none",
)
RAW = {"q": "gauss", "k": "gauss", "l2norm": True, "beta_sigmoid": True, "beta": "gauss", "g": "gauss"}
SOFTPLUS = {"gate": "softplus", "A_log": "gauss", "dt_bias": "gauss"}
BOUNDED = {"gate": "lower_bound", "lower_bound": -5.0, "safe_gate": True, "A_log": "gauss", "dt_bias": "gauss"}
BOUNDARIES = (1, 0, 15, 16, 17, 0, 63, 64, 65)

OPTIONS = {
    "plain": {},
    "safe": {"safe_gate": True},
    "safe-bound": {"safe_gate": True, "g": "bound"},
    "safe-half_bound-bf16_gate": {"safe_gate": True, "g": "half_bound", "gate_dtype": "bf16"},
    "spikes_1e6": {"g": "spikes_1e6"},
    "resets": {"g": "resets", "gate_dtype": "bf16"},
    "softplus": {**RAW, **SOFTPLUS},
    "softplus-raw_1e4": {**RAW, **SOFTPLUS, "g": "raw_1e4", "A_log": "zeros"},
    "softplus-extreme_A": {**RAW, **SOFTPLUS, "g": "raw_100", "A_log": "extreme_80", "dt_bias": None},
    "bounded": {**RAW, **BOUNDED},
    "bounded-no_parameters": {**RAW, **BOUNDED, "A_log": None, "dt_bias": None},
    "bounded-raw_1e4-extreme_A": {**RAW, **BOUNDED, "g": "raw_1e4", "A_log": "extreme_80"},
    "bounded_at_1": {**RAW, **BOUNDED, "lower_bound": -1.0},
    "bounded_at_20": {**RAW, **BOUNDED, "lower_bound": -20.0, "safe_gate": False},
    "l2norm-unit_beta": {"l2norm": True, "q": "gauss", "k": "gauss"},
    "neg_eigval": {**RAW, **BOUNDED, "neg_eigval": True},
    "fp32_gate-scale": {"scale": -3.0, "safe_gate": True},
    "gva-v_first": {"heads": 2, "group": 2, "v_first": True, "lengths": (18, 18)},
    "gva-l2norm": {**RAW, **BOUNDED, "group": 2},
    "no_states": {"initial_state": False, "final_state": False, "safe_gate": True},
    "boundaries": {"lengths": BOUNDARIES, "packed": True, "safe_gate": True},
    "boundaries-unbounded-tail": {"lengths": BOUNDARIES[::-1], "packed": True, "tail": 21, "offsets": "int32"},
    "no_tokens": {"lengths": (0, 0)},
    "no_sequences": {"lengths": (), "packed": True, "tail": 4},
    "only_a_tail": {"lengths": (0,), "packed": True, "tail": 4},
    "K128-V64": {"K": 128, **RAW, **BOUNDED},
    "K64-V128": {"V": 128, **RAW, **SOFTPLUS, "lengths": (20,)},
    "K256-V256": {"K": 256, "V": 256, "lengths": (17,), "safe_gate": True},
    "repeated_keys-beta_2": {"k": "repeated", "l2norm": True, "beta": "twos", "g": "slow", "lengths": (70,)},
}


def route_of(problem: Problem) -> str:
    return fused.SAFE_GATE if problem.safe_gate else fused.UNBOUNDED


def outputs(case: Case, route: str | None = None, **changes) -> dict[str, torch.Tensor]:
    """o and the final state of chunk_kda on a fused route; `changes` replace inputs and keywords."""
    inputs = {**case.inputs, **{name: changes.pop(name) for name in list(changes) if name in case.inputs}}
    tensors = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    words = keywords(case, "chunk") | {"cu_seqlens": inputs.get("cu_seqlens")} | changes
    given = {name: inputs[name] for name in tensors if inputs.get(name) is not None}
    with kda.force_route(route or route_of(case.problem)):
        o, ht = kda.chunk_kda(**given, **words)
    return {"o": o} | ({} if ht is None else {"ht": ht})


def judged(case: Case, got: dict[str, torch.Tensor], spec: kda.PrecisionSpec, quantities=None) -> list[str]:
    quantities = case.problem.quantities() if quantities is None else quantities
    verdicts = verdict.judge(case.inputs, case.options, got, entry="chunk", spec=spec, quantities=quantities)
    assert {v.quantity for v in verdicts} == quantities
    return [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")]


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_forward_and_state(changes, device):
    problem = replace(PLAIN, **changes)
    case = materialise(problem, device)
    assert judged(case, outputs(case), fused.PRECISION[route_of(problem)]) == []


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ, for the quantities that do."""
    return {name: n for name in a if (n := differing_bytes(a[name], b[name]))}


def case_of(route: str, device, **changes) -> Case:
    return materialise(replace(PLAIN, **{"safe_gate": route == fused.SAFE_GATE, **changes}), device)


@BOTH
@pytest.mark.parametrize("split", [13, 16])
def test_outputs_are_bitwise_causal(route, split, device):
    """New values of everything from one token on, none before it moves by a bit."""
    case, other = case_of(route, device), case_of(route, device, seed=1)
    changed = {n: torch.cat([case.inputs[n][:, :split], other.inputs[n][:, split:]], 1) for n in TOKENS}
    before, after = outputs(case)["o"], outputs(case, route, **changed)["o"]
    assert differing_bytes(before[:, :split], after[:, :split]) == 0
    assert differing_bytes(before[:, split:], after[:, split:]) > 0


def test_what_a_screen_calls_unstable_is_looked_at_again(device):
    """One key with beta 2: the first replicas put one row's gain at 1.12 of its limit, more of them at 0.4."""
    problem = Problem(
        **{"entry": "chunk", "lengths": (64,), "K": 64, "V": 64, "dtype": "bf16", "safe_gate": True, "l2norm": True},
        **{"initial_state": True, "q": "unit", "k": "repeated", "v": "gauss", "g": "slow", "beta": "twos"},
        **dict.fromkeys(("h0", "do", "dht"), "gauss"),
    )
    case = materialise(problem, device)
    assert judged(case, outputs(case), fused.PRECISION[fused.SAFE_GATE], {"o", "ht"}) == []


@BOTH
def test_repeated_keys_with_beta_2_lose_nothing_in_the_inverse(route, device):
    """Of 200 tokens that nothing decays: no further off than twice what rounding the operands alone does."""
    problem = replace(PLAIN, lengths=(200,), heads=1, k="repeated", l2norm=True, beta="twos", g="zeros")
    case = materialise(replace(problem, safe_gate=route == fused.SAFE_GATE, initial_state=False), device)
    exact = evaluate(case.inputs, case.options, gradients=False)
    formats = {"operand": "bf16", **dict.fromkeys(("intra", "merge", "stored_inverse", "state"), "fp64")}
    given = {"rounding": ToFormat(), "formats": formats, "gradients": False}
    ideal = evaluate_chunk(case.inputs, case.options, **given)
    relative = lambda x, name: float((x.double() - exact[name]).norm() / exact[name].norm())  # noqa: E731
    errors = {name: (relative(x, name), 2 * relative(ideal[name], name)) for name, x in outputs(case).items()}
    assert {name: error for name, error in errors.items() if error[0] > error[1]} == {}


@BOTH
def test_sequences_keep_their_bits_alone_in_a_batch_and_packed(route, device):
    case = case_of(route, device, lengths=(21, 21), heads=2)
    together = outputs(case)
    for n in range(2):
        alone = outputs(case, route, **{name: case.inputs[name][n : n + 1] for name in (*TOKENS, "initial_state")})
        assert differing(alone, {name: x[n : n + 1] for name, x in together.items()}) == {}
    flat = {name: case.inputs[name].flatten(0, 1)[None] for name in TOKENS}
    offsets = torch.tensor([0, 21, 42], device=device)
    packed = outputs(case, route, **flat, cu_seqlens=offsets)
    assert differing(packed, {"o": together["o"].flatten(0, 1)[None], "ht": together["ht"]}) == {}


@BOTH
def test_strided_arguments_are_read_as_they_are(route, device):
    """Tensors and offsets that are views with gaps, and v at an address that TMA cannot take."""
    case = case_of(route, device, lengths=(17, 5), packed=True)
    gapped = lambda x: torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]  # noqa: E731
    views = {name: gapped(case.inputs[name]) for name in (*TOKENS, "initial_state", "cu_seqlens")}
    v = case.inputs["v"]
    views["v"] = torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape)
    assert not views["cu_seqlens"].is_contiguous() and views["v"].data_ptr() % 16
    assert differing(outputs(case), outputs(case, route, **views)) == {}


@BOTH
def test_nan_stays_in_its_sequence(route, device):
    """NaN in every token of one sequence and in the unused tail: the neighbours keep their bits, the tail is 0."""
    case = case_of(route, device, lengths=(17, 5, 18), packed=True, tail=3)
    spoilt = {name: case.inputs[name].clone() for name in TOKENS}
    for x in spoilt.values():
        x[:, 17:22] = torch.nan
        x[:, 40:] = torch.nan
    before, after = outputs(case), outputs(case, route, **spoilt)
    assert bool(after["o"][:, 17:22].isnan().all()) and bool(after["ht"][1].isnan().all())
    assert after["o"][:, 40:].count_nonzero() == 0
    kept = [*range(17), *range(22, 43)]
    cut = lambda got: {"o": got["o"][:, kept], "ht": got["ht"][[0, 2]]}  # noqa: E731
    assert differing(cut(before), cut(after)) == {}


@BOTH
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # i < j, discarded
@pytest.mark.parametrize("exponent", [-24, 24])
def test_keys_of_any_size_fit_beside_the_shift(route, exponent, device):
    """k and q times c, beta over c^2, the state over c: for a power of two o keeps its bits, the state is scaled."""
    c = 2.0**exponent
    case = case_of(route, device, g="bound")
    x = case.inputs
    scaled = {"q": x["q"] * c, "k": x["k"] * c, "beta": x["beta"] / c**2, "initial_state": x["initial_state"] / c}
    before, after = outputs(case), outputs(case, route, **scaled)
    assert differing({"o": before["o"], "ht": before["ht"] / c}, after) == {}


@BOTH
def test_values_of_any_size_fit_beside_the_shift(route, device):
    case = case_of(route, device, g="bound")
    large = {name: case.inputs[name] * 2.0**40 for name in ("v", "initial_state")}
    expected = {name: x * 2.0**40 for name, x in outputs(case).items()}
    assert differing(expected, outputs(case, route, **large)) == {}


@pytest.mark.parametrize("gate_dtype", ["fp32", "bf16"])
def test_unbounded_reset_is_exact(gate_dtype, device):
    """-inf and -1e6 are the same reset, bit by bit."""
    case = materialise(replace(PLAIN, g="resets", gate_dtype=gate_dtype), device)
    assert bool((case.inputs["g"] == -torch.inf).any())
    finite = case.inputs["g"].clamp(min=-1e6)
    assert differing(outputs(case), outputs(case, g=finite)) == {}


@BOTH
@pytest.mark.parametrize("lengths", [(33, 0, 5, 16), (0,), ()], ids=["chunks_and_tails", "only_a_tail", "no_sequences"])
def test_descriptors_read_what_pointers_read(route, lengths, device, monkeypatch):
    """The scan by tensor descriptors, which TMA serves, against the same by pointers."""
    case = case_of(route, device, lengths=lengths, packed=True, tail=2, group=2)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 90)
    by_descriptors = outputs(case)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 80)
    assert differing(by_descriptors, outputs(case)) == {}


@BOTH
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter's sanitizer")
@pytest.mark.parametrize("arch", [80, 90], ids=["pointers", "descriptors"])
def test_kernels_are_clean_under_sanitizer_in_any_program_order(route, arch, device, monkeypatch):
    case = case_of(route, device, lengths=(17, 0, 5), packed=True, tail=3, group=2, v_first=True)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: arch)
    expected = outputs(case)
    with interpreter.sanitize():
        assert differing(expected, outputs(case)) == {}
    with interpreter.shuffle(7):
        assert differing(expected, outputs(case)) == {}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_index_finds_every_chunk(seed, dtype, device):
    """Slots are those that the scan expects: offset // 16 + sequence, then one after the other; others are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 15, 16, 17, 200], size=int(rng.integers(1, 12)))
    ends = np.concatenate([[0], lengths.cumsum()]).tolist()
    x = torch.zeros(1, ends[-1] + 7, 1, 64, device=device)
    call = Call("chunk", x, x, x, x, x[..., 0], cu_seqlens=torch.tensor(ends, device=device, dtype=dtype))
    plan = fused_fwd.FusedPlan.of(call, fused.UNBOUNDED)
    expected = {
        first // 16 + n + i: (first + 16 * i, min(16, last - first - 16 * i))
        for n, (first, last) in enumerate(itertools.pairwise(ends))
        for i in range(-(-(last - first) // 16))
    }
    rows, counts = (x.tolist() for x in fused_fwd.chunk_tables(call, plan))
    assert {slot: (rows[slot], count) for slot, count in enumerate(counts) if count} == expected


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "operands are bf16"),
        ({"dtype": torch.float16}, "operands are bf16"),
        ({"K": 96}, "K = 96"),
        ({"V": 32}, "V = 32"),
        ({"return_intermediate_states": True}, "intermediate"),
    ],
    ids=["fp32", "fp16", "K", "V", "intermediates"],
)
def test_what_fused_routes_refuse_another_serves(changes, reason, device):
    given = {"dtype": torch.bfloat16, "K": 64, "V": 64, **changes}
    dtype, K, V = given.pop("dtype"), given.pop("K"), given.pop("V")
    rows = lambda *shape: torch.zeros(1, 4, 1, *shape, dtype=dtype, device=device)  # noqa: E731
    explanation = kda.explain("chunk_kda", rows(K), rows(K), rows(V), rows(K), rows(), safe_gate=True, **given)
    assert explanation.route not in fused.PRECISION
    assert all(reason in dict(explanation.reasons)[route] for route in fused.PRECISION)


def test_gates_of_unknown_size_go_by_the_unbounded_route(device):
    x = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16, device=device)
    explanation = kda.explain("chunk_kda", x, x, x, x, x[..., 0])
    assert explanation.route == fused.UNBOUNDED
    assert "needs gates known to be in [-5, 0]" in dict(explanation.reasons)[fused.SAFE_GATE]
