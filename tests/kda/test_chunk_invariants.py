"""What DESIGN promises of the staged chunk route beyond values, each promise under its name, on both paths."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import kda
from harness import interpreter, verdict
from harness.bits import differing_bytes
from harness.call import DIFFERENTIABLE, keywords
from harness.problem import Case, Problem, materialise
from kda.chunk_bwd import PRECISION
from kda.chunk_index import ChunkIndex
from kda.chunk_stages import chunk_stages
from kda.chunk_tiles import operand
from kda.contract import Call
from oracle.chunk_model import ChunkModel
from oracle.operator import evaluate
from oracle.recurrence import Rows
from oracle.rounding import ToFormat
from oracle.stages import evaluate_chunk, forward_stages

INTERPRETED = triton.knobs.runtime.interpret
BOTH = pytest.mark.parametrize("route", PRECISION)
PLAIN = Problem(
    entry="chunk",
    lengths=(70,),
    heads=2,
    K=16,
    V=24,
    initial_state=True,
    **dict.fromkeys(("q", "k"), "unit"),
    **dict.fromkeys(("v", "h0", "do", "dht"), "gauss"),
    g="mild",
    beta="uniform",
)
PACKED = replace(PLAIN, lengths=(5, 0, 40), packed=True, tail=3, group=2, heads=1, K=8, V=8, chunk_size=32)


def outputs(route: str, case: Case, inputs=None, **words) -> dict[str, torch.Tensor]:
    """o, ht and every gradient of chunk_kda on one staged path, by quantity; `inputs` replace the case's."""
    inputs = {**case.inputs, **(inputs or {})}
    leaves = {n: inputs[n].detach().requires_grad_() for n in DIFFERENTIABLE if inputs.get(n) is not None}
    words = keywords(case, "chunk") | {"cu_seqlens": inputs.get("cu_seqlens")} | words
    words["safe_gate"] = route == "chunk-safe_gate"
    with kda.force_route(route):
        o, ht = kda.chunk_kda(**leaves, **words)[:2]
    roots = [(x, inputs[d]) for x, d in ((o, "do"), (ht, "dht")) if inputs.get(d) is not None and x is not None]
    found = torch.autograd.grad([x for x, _ in roots], list(leaves.values()), [d for _, d in roots])
    gradients = {DIFFERENTIABLE[name]: x for name, x in zip(leaves, found)}
    return {"o": o.detach(), **({} if ht is None else {"ht": ht.detach()}), **gradients}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ, for the quantities that do."""
    return {name: n for name in a if (n := differing_bytes(a[name], b[name]))}


def judged(route: str, case: Case, got: dict[str, torch.Tensor]) -> list[str]:
    """What the oracle objects to."""
    spec = PRECISION[route].of_call(case.problem.chunk_size, case.problem.precision)
    verdicts = verdict.judge(
        case.inputs, case.options, got, entry="chunk", spec=spec, quantities=case.problem.quantities()
    )
    return [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")]


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@BOTH
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_diagonal_gives_the_gate_no_gradient(route, dtype, device):
    """One token without a state before it: nothing decays, so its gate has gradient 0, and not a rounding error."""
    problem = replace(PLAIN, lengths=(1,), initial_state=False, g="bound", dtype=dtype)
    assert outputs(route, materialise(problem, device))["dg"].count_nonzero() == 0


@BOTH
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gates", ["bound", "half_bound"])
def test_all_gates_at_the_bound(route, dtype, gates, device):
    """2^54 times a value still fits, and what must cancel in dg does."""
    case = materialise(replace(PLAIN, g=gates, dtype=dtype), device)
    assert judged(route, case, outputs(route, case)) == []


@BOTH
def test_large_values_fit_beside_the_anchor(route, device):
    """Scaling v, and the states with it, by 2^40 scales o and ht by exactly that."""
    case = materialise(replace(PLAIN, g="bound"), device)
    large = {name: case.inputs[name] * 2.0**40 for name in ("v", "initial_state")}
    before, after = outputs(route, case), outputs(route, case, large)
    assert after["o"].equal(before["o"] * 2.0**40)
    assert after["ht"].equal(before["ht"] * 2.0**40)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_unbounded_reset_is_exact_and_eats_nothing(dtype, device):
    """-inf and -1e6 are the same reset, bit by bit; its gradient is exactly 0, and later decays keep theirs."""
    case = materialise(replace(PLAIN, g="mild", dtype=dtype), device)
    g = case.inputs["g"].clone()
    g[:, [3, 20, 40], :, ::2] = -1e6
    finite = {"g": g}
    infinite = {"g": torch.where(g == -1e6, -torch.inf, g)}
    got = outputs("chunk-unbounded", case, finite)
    assert differing(got, outputs("chunk-unbounded", case, infinite)) == {}
    assert got["dg"][g == -1e6].count_nonzero() == 0
    assert judged("chunk-unbounded", replace(case, inputs={**case.inputs, **finite}), got) == []


@BOTH
@pytest.mark.parametrize("keys", ["repeated", "near_repeated"])
def test_repeated_keys_with_beta_2_lose_nothing_in_the_inverse(route, keys, device):
    """Without decay: fp32 to fp32's own tolerance, bf16 no further off than twice rounding the operands alone."""
    problem = replace(PLAIN, lengths=(96,), heads=1, k=keys, g="zeros", beta="twos", initial_state=False)
    case = materialise(problem, device)
    assert judged(route, case, outputs(route, case)) == []
    case = materialise(replace(problem, dtype="bf16"), device)
    exact = evaluate(case.inputs, case.options)
    formats = {"operand": "bf16", **dict.fromkeys(("intra", "merge", "stored_inverse", "state"), "fp64")}
    ideal = evaluate_chunk(case.inputs, case.options, rounding=ToFormat(), formats=formats)
    worse = {
        name: error
        for name, x in outputs(route, case).items()
        if (error := relative(x, exact[name])) > 2 * relative(ideal[name], exact[name])
    }
    assert worse == {}


@BOTH
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_gradients_are_bitwise_causal(route, chunk_size, device):
    """New values of everything from token 40 on: gradients of a loss on the prefix keep their bits there."""
    split, case = 40, materialise(replace(PLAIN, chunk_size=chunk_size, dtype="bf16"), device)
    do = case.inputs["do"].clone()
    do[:, split:] = 0
    loss = {"do": do, "dht": torch.zeros_like(case.inputs["dht"])}
    other = materialise(replace(case.problem, seed=1), device).inputs
    names = ("q", "k", "v", "g", "beta")
    changed = {name: torch.cat([case.inputs[name][:, :split], other[name][:, split:]], 1) for name in names}
    cut = lambda got: {n: x if n in ("ht", "dh0") else x[:, :split] for n, x in got.items() if n != "ht"}  # noqa: E731
    before, after = outputs(route, case, loss), outputs(route, case, {**loss, **changed})
    assert differing(cut(before), cut(after)) == {}


@BOTH
def test_sequences_keep_their_bits_alone_in_a_batch_and_packed(route, device):
    case = materialise(replace(PLAIN, lengths=(36, 36), heads=1, chunk_size=32), device)
    together = outputs(route, case)
    names = ("q", "k", "v", "g", "beta", "do")
    for n in range(2):
        alone = {name: case.inputs[name][n : n + 1] for name in (*names, "initial_state", "dht")}
        assert differing(outputs(route, case, alone), {name: x[n : n + 1] for name, x in together.items()}) == {}
    packed = {name: case.inputs[name].flatten(0, 1)[None] for name in names}
    offsets = torch.tensor([0, 36, 72], device=device)
    states = ("ht", "dh0")
    flat = {name: x if name in states else x.flatten(0, 1)[None] for name, x in together.items()}
    assert differing(outputs(route, case, {**packed, "cu_seqlens": offsets}), flat) == {}
    assert differing(outputs(route, case, {**packed, "cu_seqlens": offsets}, cu_seqlens_cpu=offsets.cpu()), flat) == {}


@BOTH
def test_disable_recompute_changes_no_bit(route, device):
    case = materialise(PACKED, device)
    assert differing(outputs(route, case), outputs(route, case, disable_recompute=True)) == {}


@BOTH
def test_unused_tail_may_hold_anything(route, device):
    """NaN in tokens of no sequence reaches nothing; their own results are 0."""
    case, used = materialise(PACKED, device), sum(PACKED.lengths)
    names = ("q", "k", "v", "g", "beta", "do")
    spoilt = {name: case.inputs[name].clone() for name in names}
    for x in spoilt.values():
        x[:, used:] = torch.nan
    got = outputs(route, case, spoilt)
    assert differing(outputs(route, case), got) == {}
    assert all(got[name][:, used:].count_nonzero() == 0 for name in ("o", "dq", "dk", "dv", "dg", "dbeta"))


@BOTH
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter's sanitizer")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_are_clean_under_sanitizer_in_any_program_order(route, dtype, device):
    case = materialise(replace(PACKED, dtype=dtype, v_first=True), device)
    expected = outputs(route, case)
    with interpreter.sanitize():
        assert differing(expected, outputs(route, case)) == {}
    with interpreter.shuffle(7):
        assert differing(expected, outputs(route, case)) == {}


@BOTH
def test_sixty_four_chunks(route, device):
    problem = replace(PLAIN, lengths=(64 * 32,), heads=1, K=4, V=4, chunk_size=32, g="slow")
    case = materialise(problem, device)
    assert judged(route, case, outputs(route, case)) == []


@BOTH
def test_stages_are_those_of_the_oracle(route, device):
    """Every intermediate of an fp32 call, by the oracle's names."""
    problem = replace(PLAIN, lengths=(128,), heads=1)
    x = materialise(problem, device).inputs
    names = ("q", "k", "v", "g", "beta")
    call = Call("chunk", *(x[n] for n in names), scale=0.25, initial_state=x["initial_state"])
    got = chunk_stages(call, route, do=x["do"], dht=x["dht"])
    rows = Rows(*(x[n].double().transpose(1, 2) for n in names), x["initial_state"].double())
    exact = forward_stages(rows, 0.25, ChunkModel())
    far = {
        name: error
        for name in ("A_qk", "A_kk", "inverse", "w", "u", "v_new", "states")
        if (error := relative(got[name][:, 0].cpu(), _of_stage(name, exact[name])[0, 0].cpu())) > 1e-6
    }
    assert far == {}
    assert {"dA_qk", "dA_kk", "dv_new", "z", "dh"} <= set(got)


def _of_stage(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.tril(x, -1) if name == "A_kk" else torch.tril(x) if name == "A_qk" else x


@pytest.mark.parametrize("seed", range(4))
def test_chunk_index_finds_every_chunk(seed, device):
    """With and without lengths on the host; slots without a chunk have no tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 31, 32, 33, 64, 65, 200], size=int(rng.integers(0, 9)))
    ends = np.concatenate([[0], lengths.cumsum()])
    expected = [(a + i, min(32, n - i)) for a, n in zip(ends, lengths) for i in range(0, n, 32)]
    cu = torch.tensor(ends, device=device)
    x = torch.zeros(1, int(ends[-1]) + 7, 1, 1, device=device)
    for cpu in (None, cu.cpu()):
        call = Call("chunk", x, x, x, x, x[..., 0], cu_seqlens=cu, cu_seqlens_cpu=cpu, chunk_size=32)
        index = ChunkIndex.of(call)
        found = list(zip(index.rows.tolist(), index.counts.tolist()))
        assert found[: len(expected)] == expected
        assert [count for _, count in found[len(expected) :]] == [0] * (index.slots - len(expected))
        assert cpu is None or index.slots == len(expected)


@triton.jit
def round_to_tf32_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, operand(tl.load(x + o), "tf32"))


def test_tf32_operands_round_to_nearest(device):
    """Hardware would truncate; the kernels round first, and keep infinities and NaNs."""
    one = 1.0 + 2.0**-10
    given = [1.0, one, 1.0 + 2.0**-12, 1.0 + 3 * 2.0**-12, -1.0 - 3 * 2.0**-12, 0.0, torch.inf, torch.nan]
    expected = torch.tensor([1.0, one, 1.0, one, -one, 0.0, torch.inf, torch.nan], device=device)
    x = torch.tensor(given, device=device)
    y = torch.empty_like(x)
    round_to_tf32_kernel[(1,)](x, y, N=8)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("K, dtype", [(129, "fp32"), (200, "fp16"), (256, "bf16")])
def test_states_in_two_halves_are_right(K, dtype, v_first, device):
    """NOTE [Halves of a state]: the second with rows to spare or none, across chunks and empty sequences."""
    problem = replace(PACKED, lengths=(0, 33, 0, 2), group=1, K=K, V=3, dtype=dtype, v_first=v_first)
    case = materialise(problem, device)
    assert judged("chunk-unbounded", case, outputs("chunk-unbounded", case)) == []
