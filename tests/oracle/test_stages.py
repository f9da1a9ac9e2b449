"""Authority on the chunkwise algorithm: exact, it is the recurrence; stages are what they say; formats count."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from oracle.chunk_model import ChunkModel
from oracle.chunk_steps import added
from oracle.operator import Options, evaluate
from oracle.recurrence import LOG2E, Rows
from oracle.rounding import RandomGrids, ToFormat, round_to
from oracle.stages import chunked, evaluate_chunk, forward_stages

FP32 = dict.fromkeys(("operand", "intra", "merge", "stored_inverse", "state"), "fp32")


def problem(T=70, H=1, HV=2, K=5, V=7, B=1, cu_seqlens=None, seed=0, scale_g=0.3):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    return {
        "q": unit(randn(B, T, H, K)),
        "k": unit(randn(B, T, H, K)),
        "v": randn(B, T, HV, V),
        "g": -scale_g * randn(B, T, HV, K).abs(),
        "beta": torch.sigmoid(randn(B, T, HV)),
        "initial_state": randn(N, HV, K, V),
        "do": randn(B, T, HV, V),
        "dht": randn(N, HV, K, V),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens),
    }


def assert_same(got, expected, limit=1e-12):
    assert got.keys() == expected.keys()
    for name in expected:
        scale = float(expected[name].abs().max()) + 1e-300
        assert float((got[name] - expected[name]).abs().max()) <= limit * scale, name


@pytest.mark.parametrize("T", [1, 15, 16, 65, 130])
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("diagonal", ["pair", "halving", "anchor", "anchor_apart"])
def test_exact_chunks_are_the_recurrence(T, chunk, diagonal):
    x, options = problem(T), Options(intermediates=True, chunk_size=chunk)
    assert_same(evaluate_chunk(x, options, chunk=chunk, diagonal=diagonal), evaluate(x, options))


@pytest.mark.parametrize("T", [1, 16, 65])
@pytest.mark.parametrize("chunk", [16, 64])
def test_exact_residual_form_is_the_recurrence(T, chunk):
    x, options = problem(T), Options(intermediates=True, chunk_size=chunk)
    assert_same(evaluate_chunk(x, options, chunk=chunk, form="residual"), evaluate(x, options))


@pytest.mark.parametrize("T", [1, 16, 65])
@pytest.mark.parametrize("inverse", ["substitution", "neumann"])
def test_exact_stored_form_is_the_recurrence(T, inverse):
    x, options = problem(T), Options(intermediates=True, chunk_size=16)
    assert_same(evaluate_chunk(x, options, chunk=16, form="stored", inverse=inverse), evaluate(x, options))


def test_the_stored_form_stores_the_state_that_arrives_too():
    """With one token of no decay, no key and no query a state differs by how it is stored, and by nothing else."""
    x = {
        name: 0 * value if name in ("q", "k", "g") else value for name, value in problem(1).items() if value is not None
    }
    arrived = x["initial_state"]
    for fmt in ("bf16", "fp32"):
        made = evaluate_chunk(x, Options(), gradients=False, formats={"state": fmt}, chunk=16, form="stored")["ht"]
        assert torch.equal(made, arrived)
        rounded = evaluate_chunk(
            x, Options(), gradients=False, rounding=ToFormat(), formats={"state": fmt}, chunk=16, form="stored"
        )["ht"][0]
        assert torch.equal(rounded, round_to(arrived, fmt))


def test_the_stored_form_has_chunks_of_one_block():
    with pytest.raises(ValueError, match="chunk is 32, must be 16 with the form 'stored'"):
        ChunkModel.of({}, 32, None, None, "stored")


PIECES = {
    "dense": dict(T=70),
    "one_piece": dict(T=16),
    "a_token_more": dict(T=17),
    "packed": dict(T=90, cu_seqlens=[0, 0, 17, 17, 80]),
    "gva": dict(T=40, B=2, H=2, HV=6),
}


@pytest.mark.parametrize("case", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("form, segment", [("wy", 32), ("residual", 16), ("solved", 16)])
def test_exact_pieces_are_the_recurrence(case, form, segment):
    x = problem(**case)
    assert_same(evaluate_chunk(x, Options(), chunk=16, form=form, segment=segment), evaluate(x, Options()))


def test_exact_pieces_are_the_recurrence_across_resets():
    x = problem(40)
    x["g"][:, 20, :, 1:] = -math.inf
    got = evaluate_chunk(x, Options(), chunk=16, segment=16)
    assert_same(got, evaluate(x, Options()))
    assert bool((got["dg"][:, 20, :, 1:] == 0).all())


def test_pieces_round_from_the_second_on():
    """States between pieces come from transitions that were rounded; the first piece is as it was."""
    x, common = problem(48), {"rounding": ToFormat(), "formats": FP32 | {"operand": "bf16"}, "chunk": 16}
    whole, cut = (evaluate_chunk(x, Options(), **common, segment=segment) for segment in (None, 16))
    error = (cut["o"] - whole["o"]).abs().amax((0, 1, 3, 4))
    assert bool((error[:16] == 0).all()) and bool((error[16:] > 1e-6).all())
    assert float((cut["dh0"] - whole["dh0"]).abs().max()) > 1e-6


@pytest.mark.parametrize("form", ["wy", "residual", "solved", "stored"])
def test_wider_rows_share_matrices_and_end_in_the_same_state(form):
    model, x = ChunkModel(chunk=16, form=form), rows(problem(40, V=3))
    x = Rows(*(getattr(x, name).expand(4, *getattr(x, name).shape[1:]) for name in x.__dataclass_fields__))
    state = torch.cat([x.state, x.state.roll(1, -2)], -1)
    wide = replace(x, v=F.pad(x.v, (0, 3)), state=state)
    traced = chunked(x, x.g, 0.5, model, RandomGrids(4, 1))
    expected = forward_stages(wide, 0.5, model, RandomGrids(4, 1))["state"]
    assert torch.equal(traced.widened(3).last_state(state), expected)
    own = forward_stages(x, 0.5, model, RandomGrids(4, 1))
    assert all(torch.equal(value, own[name]) for name, value in traced.run(x.state).items())


@pytest.mark.parametrize("segment", [0, 8, 24])
def test_pieces_are_whole_chunks(segment):
    with pytest.raises(ValueError, match=f"segment is {segment}, must be a positive multiple of the chunk of 16"):
        ChunkModel.of({}, 16, None, None, segment=segment)


def test_pieces_have_no_intermediate_states():
    with pytest.raises(ValueError, match="segment is 16, must be None where intermediate states are wanted"):
        evaluate_chunk(problem(40), Options(intermediates=True, chunk_size=16), chunk=16, segment=16)


def test_exact_neumann_is_the_inverse():
    x = problem(64)
    exact = ChunkModel.of({}, 64, None, "neumann")
    with_series = forward_stages(rows(x), 1.0, exact)["inverse"]
    assert_same({"R": with_series}, {"R": forward_stages(rows(x), 1.0, ChunkModel())["inverse"]})


@pytest.mark.parametrize(
    "case, options",
    [
        (dict(T=90, cu_seqlens=[0, 0, 17, 17, 80]), Options(state_v_first=True)),
        (dict(T=40, B=2, H=2, HV=6), Options(scale=0.7, use_qk_l2norm_in_kernel=True)),
        (dict(T=40), Options(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
    ],
    ids=["varlen-v_first", "gva-l2norm", "neg_eigval"],
)
def test_every_option_goes_through_the_same_packing_and_gates(case, options):
    x = problem(**case)
    if options.state_v_first:
        x |= {name: x[name].mT.contiguous() for name in ("initial_state", "dht")}
    assert_same(evaluate_chunk(x, options, chunk=16), evaluate(x, options))


def test_gate_in_kernel():
    x = problem(50) | {"A_log": torch.tensor([0.3, -0.5]), "dt_bias": torch.linspace(-1, 1, 10)}
    options = Options(use_gate_in_kernel=True, lower_bound=-5.0)
    assert_same(evaluate_chunk(x, options), evaluate(x, options), 1e-11)


@pytest.mark.parametrize("reset", [-math.inf, -1e4], ids=["inf", "1e4"])
def test_resets(reset):
    x = problem(40)
    x["g"][:, 20, :, 1:] = reset
    got, expected = evaluate_chunk(x, Options(), chunk=32), evaluate(x, Options())
    if reset == -math.inf:
        assert bool((got["dg"][:, 20, :, 1:] == 0).all())
    # Beside a reset of 1e4 the cumulative sum has lost four digits of its neighbours, in float64 too.
    assert_same(got, expected, 1e-12 if reset == -math.inf else 1e-8)


@pytest.mark.parametrize("reset", [-math.inf, -1e4], ids=["inf", "1e4"])
def test_replicas_expect_noise_in_the_gradient_of_a_reset(reset):
    """A kernel's reverse cumulative sum leaves rounding noise there, so sigma must not be 0."""
    x = problem(40)
    x["g"][:, 20, :, 1:] = reset
    replicas = evaluate_chunk(x, Options(), rounding=RandomGrids(8), formats=FP32, chunk=32)
    assert float(replicas["dg"][:, :, 20, :, 1:].abs().amax(0).min()) > 0


def rows(x) -> Rows:
    part = lambda name: x[name].transpose(1, 2).flatten(0, 1)[None]  # noqa: E731
    group = x["v"].shape[2] // x["q"].shape[2]
    q, k = (part(name).repeat_interleave(group, 1) for name in ("q", "k"))
    return Rows(q, k, part("v"), part("g"), x["beta"].mT.flatten(0, 1)[None], x["initial_state"].flatten(0, 1)[None])


def test_stages_are_what_they_say():
    C, T, scale = 32, 70, 0.25
    x = problem(T)
    r, got = rows(x), forward_stages(rows(x), scale, ChunkModel(chunk=C))
    first = slice(0, C)
    G = r.g[:, :, first].cumsum(-2) * LOG2E
    assert_same({"G": got["G"][:, :, 0]}, {"G": G})
    pairs = torch.exp2((G[..., :, None, :] - G[..., None, :, :]).clamp(max=0))
    q, k, v, beta = r.q[:, :, first], r.k[:, :, first], r.v[:, :, first], r.beta[:, :, first, None]
    kk = (k[..., :, None, :] * k[..., None, :, :] * pairs).sum(-1)
    L = torch.tril(kk * beta, -1)
    R = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + L)
    w, u = R @ (beta * k * torch.exp2(G)), R @ (beta * v)
    expected = {
        "A_qk": torch.tril(scale * (q[..., :, None, :] * k[..., None, :, :] * pairs).sum(-1)),
        "inverse": R,
        "w": w,
        "u": u,
        "v_new": u - w @ r.state,
    }
    assert_same({name: got[name][:, :, 0] for name in expected}, expected)
    assert_same({"L": torch.tril(got["A_kk"][:, :, 0] * beta, -1)}, {"L": L})
    assert got["states"].shape[2] == 3 and torch.equal(got["states"][:, :, 0], r.state)
    whole = evaluate(x, Options(scale=scale))
    assert_same({"o": got["o"][0].transpose(0, 1)[None], "ht": got["state"]}, {"o": whole["o"], "ht": whole["ht"]})


@pytest.mark.parametrize("stage", FP32)
def test_the_envelope_widens_with_every_bit_that_a_stage_gives_up(stage):
    x, sigma = problem(96, K=16, V=16), []
    exact = evaluate(x, Options())
    for fmt in ("fp32", "fp16", "tf32", "bf16"):
        replicas = evaluate_chunk(x, Options(), rounding=RandomGrids(8, 1), formats=FP32 | {stage: fmt}, chunk=32)
        sigma.append({n: float((replicas[n] - exact[n]).square().mean().sqrt()) for n in ("o", "dk", "dg")})
    for finer, coarser in pairwise(sigma):
        assert all(coarser[name] > 1.5 * finer[name] for name in finer), sigma


def test_a_half_precision_series_is_worse_than_substitution():
    x = problem(64, K=16, V=16, scale_g=0.001)
    x["k"][:] = x["k"][:, :1]
    exact, sigma = evaluate(x, Options(), gradients=False)["o"], {}
    for inverse in ("substitution", "neumann"):
        given = {"rounding": RandomGrids(8, 1), "formats": FP32 | {"stored_inverse": "fp16"}, "inverse": inverse}
        replicas = evaluate_chunk(x, Options(), gradients=False, **given)["o"]
        sigma[inverse] = float((replicas - exact).square().mean().sqrt())
    assert sigma["neumann"] > 10 * sigma["substitution"]


@pytest.mark.parametrize(
    "given, named",
    [
        ({"chunk": 24}, "chunk"),
        ({"chunk": 0}, "chunk"),
        ({"diagonal": "quartering"}, "diagonal"),
        ({"inverse": "newton"}, "inverse"),
        ({"form": "uw"}, "form"),
    ],
    ids=["no_multiple", "zero", "diagonal", "inverse", "form"],
)
def test_an_algorithm_without_a_model_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        evaluate_chunk(problem(4), Options(), **given)


def test_states_at_another_chunk_size_are_refused():
    with pytest.raises(ValueError, match="chunk_size"):
        evaluate_chunk(problem(40), Options(intermediates=True, chunk_size=32), chunk=16)


def test_a_halved_range_survives_what_a_cumulative_sum_does_not():
    """A gate of -5e38 beside mild ones: differences of sums are lost, sums over each range are not."""
    x = problem(20)
    x["g"][:, 7] = -5e38
    finite = {
        diagonal: all(bool(torch.isfinite(value).all()) for value in _replicas(x, diagonal).values())
        for diagonal in ("pair", "halving")
    }
    assert finite == {"pair": False, "halving": True}
    exact = evaluate(x, Options())
    for name, value in _replicas(x, "halving").items():
        torch.testing.assert_close(value, exact[name].expand_as(value), rtol=1e-4, atol=1e-5)


def _replicas(x: dict[str, torch.Tensor], diagonal: str) -> dict[str, torch.Tensor]:
    return evaluate_chunk(x, Options(), rounding=RandomGrids(4), formats=FP32, diagonal=diagonal)


def test_what_is_kept_of_the_states_counts_for_gates_alone():
    x = problem(40, K=16, V=16)
    coarse, fine = (
        evaluate_chunk(x, Options(), rounding=RandomGrids(8, 1), formats=FP32 | {"kept": fmt}, chunk=16)
        for fmt in ("bf16", "fp32")
    )
    exact = evaluate(x, Options())
    assert {name for name in exact if not torch.equal(coarse[name], fine[name])} == {"dg"}
    error = lambda got: float((got["dg"] - exact["dg"]).square().mean().sqrt())  # noqa: E731
    assert error(coarse) > 100 * error(fine)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_numbers_of_16_bits_are_added_in_their_format(fmt):
    """As hardware does without being told to widen: half a step beside 1 is lost, two of them first added are not."""
    half = 2.0 ** {"bf16": -8, "fp16": -11}[fmt]
    rows = torch.tensor([[1.0, half, half, 0.0], [1.0, 0.0, half, half]], dtype=torch.float64)
    assert added(ToFormat(), "sum", rows, fmt).tolist() == [1.0, 1.0 + 2 * half]
    assert added(ToFormat(), "sum", rows, "fp32").tolist() == [1.0 + 2 * half] * 2
