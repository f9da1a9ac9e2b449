"""Segment parallelism: the chain of states, the pieces, and the routes against the oracle and beside the fused ones."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kda
from harness import interpreter, verdict
from harness.bits import differing_bytes
from harness.problem import Case, materialise
from harness.subject import own_subject
from kda import fused, fused_fwd, fused_segments, registry
from kda.contract import Call
from kda.segments import Pieces, chain, chain_back
from tests.kda.test_chunk_fused import BOUNDED, INTERPRETED, PLAIN, RAW, SOFTPLUS, TOKENS, differing, outputs
from tests.kda.test_chunk_fused_bwd import gradients

BOTH = pytest.mark.parametrize("route", fused_segments.PRECISION)
TRAINED = replace(PLAIN, loss="both", lengths=(40,))
PACKED = {"packed": True, "lengths": (5, 0, 33, 16, 18), "tail": 3}

OPTIONS = {
    "plain": {},
    "safe-bound": {"safe_gate": True, "g": "bound"},
    "resets": {"g": "resets"},
    "bounded-packed-gva-v_first": {**RAW, **BOUNDED, **PACKED, "heads": 2, "group": 2, "v_first": True},
    "softplus-dense_batch": {**RAW, **SOFTPLUS, "lengths": (35, 35), "loss": "o"},
    "no_initial_state": {**PACKED, "initial_state": False, "safe_gate": True},
    "loss_of_the_state": {"loss": "state", "v_first": True},
    "no_states": {"initial_state": False, "final_state": False, "loss": "o"},
    "K128-V64": {"K": 128, "lengths": (33,), "safe_gate": True},
    "K64-V128": {"V": 128, "lengths": (33,)},
    "repeated_keys-beta_2": {"k": "repeated", "l2norm": True, "beta": "twos", "g": "slow", "lengths": (70,)},
    "one_piece": {"lengths": (16, 16)},
    "no_tokens": {"lengths": (0, 0)},
    "no_sequences": {"lengths": (), "packed": True, "tail": 40},
}


def route_of(safe_gate: bool) -> str:
    return fused_segments.SAFE_GATE if safe_gate else fused_segments.UNBOUNDED


def everything(case: Case, route: str, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return outputs(case, route, **changes) | gradients(case, route, **changes)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_results_and_gradients(changes, device):
    problem = replace(TRAINED, **changes)
    case, route = materialise(problem, device), own_subject().route(route_of(problem.safe_gate), "chunk")
    spec, wanted = route.judged_by(problem), problem.quantities()
    assert spec.segment == spec.gradients.segment == 16, "tiny problems are in pieces of one chunk"
    verdicts = verdict.judge(
        case.inputs, case.options, everything(case, route.id), entry="chunk", spec=spec, quantities=wanted
    )
    assert {v.quantity for v in verdicts} == wanted
    assert [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")] == []


def case_of(route: str, device: str, **changes: object) -> Case:
    return materialise(replace(TRAINED, safe_gate=route == fused_segments.SAFE_GATE, **changes), device)


@BOTH
def test_first_and_last_pieces_have_the_bits_of_whole_sequences(route, device):
    """Chunks are where they were: o of the first piece, and gradients of the last one by its own outputs."""
    case = case_of(route, device, **PACKED)
    got, whole = everything(case, route), everything(case, route.replace("segment_parallel", "fused"))
    starts = [a for a, b in zip(*offsets_of(case)) if b > a]
    first = [t for a, b in zip(*offsets_of(case)) for t in range(a, min(b, a + 16))]
    assert first and differing_bytes(got["o"][:, first], whole["o"][:, first]) == 0
    last = [t for a, b in zip(*offsets_of(case)) for t in range(max(a, b - (b - a - 1) % 16 - 1), b)]
    assert starts and differing_bytes(got["dv"][:, last], whole["dv"][:, last]) == 0
    assert differing(got, whole) != {}, "no sequence was cut"
    assert got["o"][:, -3:].count_nonzero() == 0 and got["dq"][:, -3:].count_nonzero() == 0


def offsets_of(case: Case) -> tuple[list[int], list[int]]:
    offsets = case.inputs["cu_seqlens"].tolist()
    return offsets[:-1], offsets[1:]


@BOTH
def test_the_record_has_the_kernels_of_both_passes(route, device):
    case = case_of(route, device)
    with kda.record_launches() as launches:
        gradients(case, route)
    assert {launch.route for launch in launches} == {route}
    scans = ["kda_fused_scan_kernel"] * 3
    tables = "kda_fused_index_kernel"
    assert [launch.kernel for launch in launches] == [
        *(tables, "kda_fused_prep_kernel", *scans),
        *(tables, "kda_fused_prep_kernel", *scans[:2], "kda_fused_scan_bwd_kernel", scans[0]),
        *("kda_fused_scan_bwd_kernel", "kda_fused_chunk_bwd_kernel"),
    ]


@BOTH
def test_nan_stays_in_its_sequence(route, device):
    case = case_of(route, device, packed=True, lengths=(20, 18, 33), tail=2)
    spoilt = {name: case.inputs[name].clone() for name in TOKENS}
    for x in spoilt.values():
        x[:, 20:38] = torch.nan
        x[:, 71:] = torch.nan
    kept = [*range(20), *range(38, 73)]
    cut = lambda got: {n: x[[0, 2]] if n in ("ht", "dh0") else x[:, kept] for n, x in got.items()}  # noqa: E731
    before, after = everything(case, route), everything(case, route, **spoilt)
    assert differing(cut(before), cut(after)) == {}
    assert bool(after["o"][:, 20:38].isnan().all()) and bool(after["ht"][1].isnan().all())


@BOTH
def test_descriptors_read_what_pointers_read(route, device, monkeypatch):
    case = case_of(route, device, packed=True, lengths=(33, 0, 18), tail=2)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 90)
    by_descriptors = everything(case, route)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: 80)
    assert differing(by_descriptors, everything(case, route)) == {}


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter's sanitizer")
@pytest.mark.parametrize("arch", [80, 90], ids=["pointers", "descriptors"])
def test_clean_under_sanitizer_in_any_program_order(arch, device, monkeypatch):
    route = fused_segments.UNBOUNDED
    case = case_of(route, device, packed=True, lengths=(17, 0, 5), tail=3)
    monkeypatch.setattr(fused_fwd, "arch", lambda device: arch)
    expected = everything(case, route)
    with interpreter.sanitize():
        assert differing(expected, everything(case, route)) == {}
    with interpreter.shuffle(7):
        assert differing(expected, everything(case, route)) == {}


def test_compiled_calls_have_the_bits_of_eager_ones(device):
    case, route = case_of(fused_segments.UNBOUNDED, device), fused_segments.UNBOUNDED
    leaves = lambda: {n: case.inputs[n].detach().clone().requires_grad_() for n in TOKENS}  # noqa: E731
    found = []
    for entry in (kda.chunk_kda, torch.compile(kda.chunk_kda, fullgraph=True, backend="aot_eager")):
        call = leaves()
        with kda.force_route(route):
            entry(**call)[0].float().square().sum().backward()
        found.append({name: x.grad for name, x in call.items()})
    torch._dynamo.reset()
    assert differing(*found) == {}


def call_of(lengths: tuple[int, ...], packed: bool) -> Call:
    rows = sum(lengths) + 7 * packed if packed else lengths[0]
    x = torch.zeros(1 if packed else len(lengths), rows, 1, 64)
    ends = torch.tensor([0, *itertools.accumulate(lengths)]) if packed else None
    return Call("chunk", x, x, x, x, x[..., 0], cu_seqlens=ends)


@pytest.mark.parametrize(
    "lengths, packed",
    [((40, 0, 16, 1, 17, 0), True), ((0, 0), True), ((33, 33), False), ((16,), False), ((4, 31, 32, 33), True)],
    ids=["packed", "no_tokens", "dense", "one_chunk", "boundaries"],
)
def test_pieces_are_whole_sequences_cut_every_16_tokens(lengths, packed):
    pieces = Pieces.of(call_of(lengths, packed), 16)
    begins = [0, *itertools.accumulate(lengths)]
    expected = [[(a + i, min(a + i + 16, b)) for i in range(0, b - a, 16)] for a, b in itertools.pairwise(begins)]
    spans = torch.stack([pieces.offsets[:-1], pieces.offsets[1:]], -1)
    found = pieces.by_sequence(spans, -1).tolist()
    assert [[tuple(x) for x in row if x[0] >= 0] for row in found] == expected
    assert sum(int(b > a) for a, b in spans.tolist()) == sum(map(len, expected)), "other slots are empty"
    last = pieces.last(spans).tolist()
    assert last == [list(row[-1]) if row else [a, a] for a, row in zip(begins, expected)]


@pytest.fixture
def maps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P `[2, 5, 3, 4, 4]`, Q `[2, 5, 3, 4, 6]` and a state, fp32."""
    made = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=made)  # noqa: E731
    return normal(2, 5, 3, 4, 4), normal(2, 5, 3, 4, 6), normal(2, 3, 4, 6)


def test_chain_is_the_recurrence_and_its_back_the_adjoint(maps):
    P, Q, first = (x.double().requires_grad_() for x in maps)
    states = [first]
    for j in range(5):
        states.append(P[:, j] @ states[-1] + Q[:, j])
    assert torch.equal(torch.stack(states, 1).float(), chain(*maps))
    weights = torch.randn(2, 6, 3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((torch.stack(states, 1) * weights).sum(), [first, Q])
    back = chain_back(maps[0], weights[:, :5].float(), weights[:, 5].float())
    assert torch.equal(back[:, 5], weights[:, 5].float())
    torch.testing.assert_close(back[:, 0].double(), found[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(back[:, 1:].double(), found[1], rtol=1e-6, atol=1e-5)


def test_chain_is_not_reached_by_autocast(maps):
    with torch.autocast("cpu", torch.bfloat16):
        inside = chain(*maps)
    assert inside.dtype == torch.float32 and torch.equal(inside, chain(*maps))


def gpu_call(tokens: int, heads: int, V: int = 128, sequences: int = 1) -> Call:
    rows = lambda *shape: torch.empty(1, tokens, heads, *shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    offsets = torch.empty(sequences + 1, dtype=torch.int64, device="cuda") if sequences > 1 else None
    return Call("chunk", rows(64), rows(64), rows(V), rows(64), rows(), safe_gate=True, cu_seqlens=offsets)


LEAST = fused_segments.LEAST_TOKENS
SHORT = f"pays from {LEAST} tokens a sequence on, unless it is forced"
MANY = "pays where 66 programs scan whole sequences, not {}, unless it is forced"
PAYS = {
    "long-few_heads": ((LEAST, 8), None),
    "16384_tokens": ((16384, 8), SHORT),
    "short": ((LEAST - 1, 8), SHORT),
    "many_short": ((LEAST, 8, 128, 2), SHORT),
    "two_sequences": ((2 * LEAST, 8, 128, 2), None),
    "32_heads": ((LEAST, 32), None),
    "many_heads": ((LEAST, 34), MANY.format(68)),
    "many_sequences": ((17 * LEAST, 2, 128, 17), MANY.format(68)),
}


@pytest.mark.parametrize("arguments, reason", PAYS.values(), ids=PAYS)
def test_a_route_is_chosen_where_it_pays(arguments, reason, monkeypatch):
    monkeypatch.setattr(registry, "INTERPRETED", False)
    monkeypatch.setattr("kda.fused_fwd.arch", lambda device: 90)
    monkeypatch.setattr(fused_segments, "multiprocessors", lambda device: 132)
    with FakeTensorMode():
        call = gpu_call(*arguments)
        chosen = registry.choose(call)
        assert registry.route_named(fused_segments.SAFE_GATE).verify(call) == reason
        assert chosen.route == (fused_segments.SAFE_GATE if reason is None else fused.SAFE_GATE)
        with kda.force_route(fused_segments.UNBOUNDED):
            assert registry.choose(call).route == fused_segments.UNBOUNDED


def test_on_a_cpu_a_route_is_only_forced(device):
    if device != "cpu":
        pytest.skip("there is a GPU")
    x = torch.empty(1, LEAST, 1, 64, dtype=torch.bfloat16)
    reasons = dict(kda.explain("chunk_kda", x, x, x, x, x[..., 0], safe_gate=True).reasons)
    assert reasons[fused_segments.SAFE_GATE] == "pays on GPUs, not on cpu, unless it is forced"


def test_pieces_are_as_long_as_makes_the_programs_enough():
    tokens = fused_segments.segment_tokens
    assert tokens(65536, 8, 128, 128) == 4096 and tokens(16384, 4, 128, 128) == 512
    assert tokens(65536, 32, 128, 128) == 16384 and tokens(37, 1, 64, 64) == 16
