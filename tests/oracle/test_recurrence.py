"""The recurrence in float64: its adjoint, its checkpoints, its memory, resets, and every rounding point."""

import math
import weakref
from dataclasses import fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import recurrence
from oracle.recurrence import FP32, LIVE_STATES, Rows, Stages, backward, forward, segment_length
from oracle.rounding import EXACT, RandomGrids, Rounding, ToFormat, round_to

AGREEMENT = 1e-12  # of a tensor's largest element
NAMES = ("q", "k", "v", "g", "beta", "state")


def rows(T=9, R=2, K=3, V=4, seed=0, unit=False):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k = randn(1, R, T, K), randn(1, R, T, K)
    if unit:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    v, g, beta, state = randn(1, R, T, V), -randn(1, R, T, K).abs(), torch.sigmoid(randn(1, R, T)), randn(1, R, K, V)
    return Rows(q, k, v, g, beta, state), randn(1, R, T, V), randn(1, R, K, V)


def replicated(x, count):
    return Rows(*(getattr(x, name).expand(count, *getattr(x, name).shape[1:]) for name in NAMES))


def both(x, do, dstate, scale=0.5, rounding=EXACT, stages=FP32, every=None):
    """Everything the recurrence returns, by name."""
    every = every or segment_length(x.length)
    o, state, kept = forward(x, scale, rounding, stages, every)
    return {"o": o, "ht": state, **backward(x, kept, every, do, dstate, scale, rounding, stages)}


def naive(q, k, v, g, beta, state, scale):
    """The five lines, one row and token at a time."""
    outputs = []
    for t in range(q.shape[2]):
        state = torch.exp(g[:, :, t])[..., None] * state
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("mrkv,mrk->mrv", state, k[:, :, t]))
        state = state + torch.einsum("mrk,mrv->mrkv", k[:, :, t], u)
        outputs.append(scale * torch.einsum("mrkv,mrk->mrv", state, q[:, :, t]))
    return torch.stack(outputs, 2), state


def assert_close(got, expected, name):
    assert float((got - expected).abs().max()) <= AGREEMENT * float(expected.abs().max()), name


@pytest.mark.parametrize("T, K, V", [(1, 3, 4), (2, 1, 1), (9, 3, 4), (40, 8, 5)])
def test_adjoint_is_autograd_of_the_five_lines(T, K, V):
    x, do, dstate = rows(T, K=K, V=V)
    leaves = [getattr(x, name).clone().requires_grad_() for name in NAMES]
    o, state = naive(*leaves, 0.5)
    gradients = torch.autograd.grad((o * do).sum() + (state * dstate).sum(), leaves)
    got = both(x, do, dstate)
    assert_close(got["o"], o.detach(), "o")
    assert_close(got["ht"], state.detach(), "ht")
    for name, gradient in zip(NAMES, gradients):
        assert_close(got[f"d{name}"], gradient, name)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return forward(Rows(*tensors), 0.5)[:2]

    @staticmethod
    def backward(ctx, do, dstate):
        x = Rows(*ctx.saved_tensors)
        kept = forward(x, 0.5, keep_every=2)[2]
        gradients = backward(x, kept, 2, do, dstate, 0.5)
        return tuple(gradients[f"d{name}"] for name in NAMES)


@pytest.mark.parametrize("keys", ["generic", "repeated"])
def test_gradcheck(keys):
    x, _, _ = rows(T=5, R=1, K=2, V=3)
    k = x.k if keys == "generic" else x.k[:, :, :1].expand_as(x.k)
    leaves = [getattr(replace(x, k=k), name).clone().requires_grad_() for name in NAMES]
    assert torch.autograd.gradcheck(_Differentiable.apply, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("rounding", ["exact", "grids", "format"])
@pytest.mark.parametrize("every", [1, 2, 7, 30, 64])
def test_checkpoints_leave_no_trace(every, rounding):
    """Any segment length gives the same bits: a recomputed token meets the rounding functions it met before."""
    rounding = {"exact": EXACT, "grids": RandomGrids(4), "format": ToFormat()}[rounding]
    x, do, dstate = rows(T=30, unit=True)
    x = replicated(x, max(rounding.replicas, 1))
    usual = both(x, do, dstate, rounding=rounding)
    for name, value in both(x, do, dstate, rounding=rounding, every=every).items():
        if rounding.replicas > 1 and name in (
            "dq",
            "dk",
            "dg",
            "dbeta",
        ):  # reduced a segment at a time: dither by place
            assert float((value - usual[name]).abs().max()) < 1e-5 * float(value.abs().max()), name
        else:
            assert torch.equal(value, usual[name]), name


@pytest.mark.parametrize("every", [1, 3, 4, 9, 20])
def test_kept_states_are_those_before_their_token(every):
    x, _, _ = rows(T=9)
    kept = forward(x, 0.5, keep_every=every)[2]
    assert len(kept) == -(-9 // every)
    for index, state in enumerate(kept):
        cut = Rows(*(getattr(x, name)[:, :, : index * every] for name in NAMES[:-1]), x.state)
        assert torch.equal(forward(cut, 0.5)[1], state)


class _LiveElements(TorchDispatchMode):
    """The most elements of large tensors alive at once, views and small tensors not counted."""

    def __init__(self, at_least):
        super().__init__()
        self.at_least, self.now, self.peak, self.seen = at_least, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor)
        return out

    def _enter(self, tensor):
        place = tensor.untyped_storage().data_ptr()
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if size < self.at_least or place in self.seen:
            return
        self.seen.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._leave, place, size)

    def _leave(self, place, size):
        self.seen.discard(place)
        self.now -= size


@pytest.mark.parametrize("T", [100, 400, 900])
def test_live_states_grow_with_the_root_of_T(T):
    x, do, dstate = rows(T, R=1, K=64, V=64)
    with _LiveElements(at_least=64 * 64) as live:
        both(x, do, dstate)
    inputs = (8 + 4) * T  # sixty-fourths of a state: q, k, decays and the outputs, about a dozen vectors a token
    assert live.peak / 64**2 <= LIVE_STATES * segment_length(T) + inputs / 64 + 8
    assert live.peak / 64**2 > segment_length(T)


@pytest.mark.parametrize("every", [None, 1, 4, 40])
@pytest.mark.parametrize(
    "stages", [FP32, Stages(update="bf16"), Stages(state="bf16", carried="bf16")], ids=["fp32", "update", "carried"]
)
def test_states_of_all_tokens_give_what_checkpoints_give(stages, every):
    x, do, dstate = rows(T=19, K=16, V=8, unit=True)
    x, room, every = replicated(x, 6), recurrence.Room(reused=True), every or segment_length(19)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        some, grids = x.some(first, last), RandomGrids(6, 3).some(first, last)
        expected = both(some, do, dstate, rounding=grids, stages=stages, every=every)
        kept = forward(some, 0.5, grids, stages, every)[2]
        o, state, states, gradients = recurrence.both(some, 0.5, do, dstate, grids, stages, every, True, room)
        got = {"o": o, "ht": state, **gradients}
        assert got.keys() == expected.keys() and all(torch.equal(a, b) for a, b in zip(states, kept, strict=True))
        for name, value in expected.items():
            assert_close(got[name], value, name)
            assert name in ("o", "dq") or torch.equal(got[name], value), name


def resets(T=12):
    x, do, dstate = rows(T)
    g = x.g.clone()
    g[:, :, 3, 1] = g[:, :, 7] = g[:, :, 8] = g[:, 0, 11, 0] = -math.inf
    return replace(x, g=g), do, dstate


def test_a_reset_is_exact():
    x, do, dstate = resets()
    got = both(x, do, dstate)
    assert all(bool(torch.isfinite(value).all()) for value in got.values())
    assert not bool(got["dg"][x.g == -math.inf].any())
    assert bool((got["dg"][x.g > -math.inf].abs() > 0).all())
    later = torch.cat([torch.zeros_like(do[:, :, :7]), do[:, :, 7:]], 2)
    assert not bool(both(x, later, dstate)["dstate"].any())  # token 7 resets every row
    moved = both(replace(x, state=x.state + 100), do, dstate)
    assert torch.equal(moved["o"][:, :, 7:], got["o"][:, :, 7:]) and torch.equal(moved["ht"], got["ht"])
    after = Rows(*(getattr(x, name)[:, :, 8:] for name in NAMES[:-1]), torch.zeros_like(x.state))
    assert torch.equal(forward(after, 0.5)[1], got["ht"])


def test_a_very_negative_gate_is_a_reset():
    x, do, dstate = resets()
    finite = replace(x, g=x.g.clamp(min=-1e6))
    for name, value in both(finite, do, dstate).items():
        assert torch.equal(value, both(x, do, dstate)[name]), name


def test_resets_in_replicas_stay_below_every_floor():
    x, do, dstate = resets()
    exact, got = both(x, do, dstate), both(replicated(x, 8), do, dstate, rounding=RandomGrids(8))
    for name, value in got.items():
        assert bool(torch.isfinite(value).all()), name
        assert float((value - exact[name]).abs().max()) <= 1e-5 * max(1.0, float(exact[name].abs().max())), name
    assert float(got["dg"].masked_select(x.g == -math.inf).abs().max()) < 2.0**-120


class _Record(Rounding):
    """One replica; what is rounded where, to which format, unchanged."""

    replicas = 1

    def __init__(self):
        self.rounded, self.accumulated, self.constants = {}, set(), set()

    def round(self, site, x, fmt):
        self.rounded.setdefault(site, set()).add(fmt)
        return x

    def accumulate(self, site, value, magnitude, bits=23):
        assert bool((magnitude * (1 + 1e-12) >= value.abs()).all()), site
        self.accumulated.add(site)
        return value

    def constant(self, site, eps, like):
        self.constants.add(site)
        return 1.0


def recorded(stages):
    record = _Record()
    both(*rows(), rounding=record, stages=stages)
    return record


def test_every_rounding_point_is_visited():
    record = recorded(FP32)
    names = "exponent decay decayed residual update outer state do_outer state_grad update_grad outer_grad rest_grad"
    names += " decayed_grad dq.partial dk.partial dg.partial"
    assert record.rounded == {f"recurrence.{name}": {"fp32"} for name in names.split()}
    sums = "k_state q_state k_grad dq dk_update dk_pull dg dbeta"
    assert record.accumulated == {f"recurrence.{name}" for name in sums.split()}
    assert record.constants == {f"recurrence.{name}" for name in ("scale", "log2e", "exp2")}


@pytest.mark.parametrize("stage", [field.name for field in fields(Stages)])
def test_every_stage_has_its_format(stage):
    rounded = recorded(Stages.of({stage: "bf16", "o": "fp16"})).rounded
    assert "bf16" in {fmt for fmts in rounded.values() for fmt in fmts}
    assert rounded["recurrence." + {"partial_grad": "dq.partial"}.get(stage, stage)] == {"bf16"}
    x, do, dstate = rows(T=20, unit=True)
    plain = both(x, do, dstate, rounding=ToFormat())
    coarse = both(x, do, dstate, rounding=ToFormat(), stages=Stages.of({stage: "bf16"}))
    moved = {name for name in plain if not torch.equal(plain[name], coarse[name])}
    forward_too = stage in ("decay", "state", "carried", "update")
    assert moved and (("o" in moved) == forward_too), moved


def test_a_carried_state_is_rounded_after_its_output_and_before_the_next_token():
    x = rows(T=2)[0]
    whole = forward(x, 0.5, ToFormat(), Stages.of({"carried": "bf16"}))
    cut = lambda t, state: Rows(*(getattr(x, name)[:, :, t : t + 1] for name in NAMES[:5]), state)  # noqa: E731
    o, state, _ = forward(cut(0, x.state), 0.5, ToFormat())
    assert torch.equal(whole[0][:, :, :1], o)
    o, state, _ = forward(cut(1, round_to(state, "bf16")), 0.5, ToFormat())
    assert torch.equal(whole[0][:, :, 1:], o) and torch.equal(whole[1], state)


def test_low_precision_operands_hide_the_accumulation():
    record = recorded(Stages.of({"update": "bf16"}))
    assert record.rounded["recurrence.k_state.operand"] == {"bf16"} == record.rounded["recurrence.update_grad"]
    assert record.accumulated == {"recurrence.dg", "recurrence.dbeta"}


def test_equal_rows_get_equal_errors_where_nothing_dithers():
    """A rounding function knows only the value: two equal rows of a replica on the format's own grid stay equal."""
    x, do, dstate = rows(T=20, R=1, unit=True)
    twice = Rows(*(getattr(x, name).repeat(1, 2, *[1] * (getattr(x, name).dim() - 2)) for name in NAMES))
    for name, value in both(replicated(twice, 4), do, dstate, rounding=RandomGrids(4)).items():
        assert torch.equal(value[0, 0], value[0, 1]), name  # replica 0


def test_replicas_err_by_fp32_roundoffs():
    x, do, dstate = rows(T=40, unit=True)
    exact, got = both(x, do, dstate), both(replicated(x, 16), do, dstate, rounding=RandomGrids(16))
    for name, value in got.items():
        sigma = float((value - exact[name]).square().mean().sqrt() / exact[name].square().mean().sqrt())
        assert 2.0**-27 < sigma < 2.0**-20, (name, sigma)


def test_zero_stays_zero():
    x, do, dstate = rows(T=10)
    beta = x.beta.clone()
    beta[:, :, 4] = 0
    got = both(replicated(replace(x, beta=beta), 8), do, dstate, rounding=RandomGrids(8))
    assert not bool(got["dv"][:, :, 4].any()) and not bool(got["dk"][:, :, 4].any())


def test_no_tokens():
    x, do, dstate = rows(T=0)
    o, state, kept = forward(x, 0.5, keep_every=1)
    assert o.shape == do.shape and torch.equal(state, x.state) and kept == []
    assert torch.equal(backward(x, kept, 1, do, dstate, 0.5)["dstate"], dstate)
