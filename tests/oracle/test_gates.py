"""Activations and their slopes: element by element against mpmath at the extremes, and the size of fp32's errors."""

import itertools
import math

import mpmath
import pytest
import torch
from mpmath import mpf

from oracle.gates import TANH_APPROX, activate_beta, activate_gate, l2norm, sigmoid_slope, softplus
from oracle.rounding import EXACT, RandomGrids, ToFormat

RELATIVE = 1e-12  # of each element; e^x at |x| = 700 alone costs 1e-13
NORMAL = 1e-290  # float64 loses digits below it
RAW = [0.0, 1e-30, 1e-3, 1.0, 17.0, 39.9, 40.1, 100.0, 740.0, 1e4]
A_LOGS = [-100.0, -3.0, 0.0, 5.0, 40.0, 88.7, 300.0, 700.0]
KINDS = {"softplus": None, "lower_bound": -5.0}


def raw_gates():
    return torch.tensor([sign * value for value in RAW for sign in (1, -1)], dtype=torch.float64).view(1, -1, 1, 1)


def true_gate(z, A, bound):
    """(g, dg/dz, dg/dA_log) in mpmath."""
    z, rate = mpf(z), mpmath.exp(mpf(A))
    if bound is None:
        g, p = -rate * mpmath.log1p(mpmath.exp(z)), 1 / (1 + mpmath.exp(-z))
        return g, -rate * p, g
    x = rate * z
    p = 1 / (1 + mpmath.exp(-x))
    slope = bound * p * p * mpmath.exp(-x) if x > 0 else bound * p * (1 - p)
    return bound * p, slope * rate, slope * x


@pytest.mark.parametrize("A", A_LOGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_its_derivatives_at_the_extremes(kind, A):
    steepest = [sign * 750 * math.exp(-A) for sign in (1, -1)]  # sigmoid'(750) underflows, e^A times it need not
    raw = torch.cat([raw_gates(), torch.tensor(steepest, dtype=torch.float64).view(1, 2, 1, 1)], 1)
    dA, ones = torch.tensor([A], dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    g, adjoint = activate_gate(raw, dA, None, KINDS[kind], EXACT)
    dg = adjoint(ones.expand_as(raw))["dg"]
    with mpmath.workdps(6000):  # 1 - p cancels e^-10000 away
        for t, z in enumerate(raw.flatten().tolist()):
            _, alone = activate_gate(raw[:, t : t + 1], dA, None, KINDS[kind], EXACT)
            got = (g[0, t, 0, 0], dg[0, t, 0, 0], alone(ones)["dA_log"][0, 0])
            for value, exact in zip(map(float, got), true_gate(z, A, KINDS[kind])):
                assert abs(value - exact) <= RELATIVE * abs(exact) + NORMAL, (z, value)


ROUNDINGS = {"exact": EXACT, "grids": RandomGrids(8), "format": ToFormat()}
FP32_A_LOGS = [-100.0, 0.0, 88.7]


@pytest.mark.parametrize(
    "rounding, A", [("exact", 709.0), ("exact", 1000.0), *itertools.product(ROUNDINGS, FP32_A_LOGS)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_ever_nan(kind, A, rounding):
    rounding = ROUNDINGS[rounding]
    raw = torch.tensor([0.0, -0.0, 1e-300, 1.0, -1.0, 1e4, -1e4, math.inf, -math.inf], dtype=torch.float64)
    raw = raw.view(1, -1, 1, 1).expand(max(rounding.replicas, 1), -1, -1, -1)
    bias = torch.tensor([0.5], dtype=torch.float64)
    g, adjoint = activate_gate(raw, torch.tensor([A], dtype=torch.float64), bias, KINDS[kind], rounding)
    assert bool((g <= 0).all())
    at_rest = adjoint(torch.where(torch.isfinite(g), 1e-3, 0.0) * torch.ones_like(g))  # as a reset does it
    for name, value in at_rest.items():
        assert not bool(value.isnan().any()), name
    zero = adjoint(torch.zeros_like(g))
    assert all(not bool(value.any()) for value in zero.values())


@pytest.mark.parametrize("kind", KINDS)
def test_adjoint_of_many_heads_and_channels(kind):
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    raw, A, bias, dg = randn(1, 5, 3, 4), randn(3), randn(12), randn(1, 5, 3, 4)
    got = activate_gate(raw, A, bias, KINDS[kind], EXACT)[1](dg)
    leaves = [raw.clone().requires_grad_(), A.clone().requires_grad_(), bias.clone().requires_grad_()]
    z, rate = leaves[0] + leaves[2].view(3, 4), leaves[1].exp()[:, None]
    bound = KINDS[kind]
    g = -rate * torch.log1p(z.exp()) if bound is None else bound / (1 + torch.exp(-rate * z))
    for name, expected in zip(("dg", "dA_log", "ddt_bias"), torch.autograd.grad(g, leaves, dg)):
        value = got[name] if name == "dg" else got[name][0]
        assert float((value - expected).abs().max()) <= RELATIVE * float(expected.abs().max()), name


def test_without_A_log_the_bounded_gate_has_multiplier_one():
    raw = raw_gates()
    zero = torch.zeros(1, dtype=torch.float64)
    g, adjoint = activate_gate(raw, None, None, -5.0, EXACT)
    expected, other = activate_gate(raw, zero, None, -5.0, EXACT)
    assert torch.equal(g, expected) and adjoint(g).keys() == {"dg"} and torch.equal(adjoint(g)["dg"], other(g)["dg"])


def spread(value, exact):
    """Root mean square relative distance of the replicas from the exact value."""
    return float(((value / exact - 1) ** 2).mean().sqrt())


def one_gate(z, A, bound, replicas):
    raw = torch.full((1, 1, 1, 1), z, dtype=torch.float64)
    rounding = RandomGrids(replicas, seed=3) if replicas else EXACT
    A = torch.tensor([A], dtype=torch.float64)
    g, adjoint = activate_gate(raw.expand(max(replicas, 1), 1, 1, 1), A, None, bound, rounding)
    return {"g": g, **adjoint(torch.ones_like(g))}


@pytest.mark.parametrize("z", [-30.0, -100.0, -170.0])
def test_rounding_z_costs_an_exponential_gate_its_size(z):
    """fp32 rounds z by up to |z| 2^-24, and A_log + z likewise: that is the relative error of e^(A_log + z)."""
    z, A = z * 1.0000001234567, 85.0
    got, exact = one_gate(z, A, None, 400), one_gate(z, A, None, 0)
    for name in ("g", "dg", "dA_log"):
        unit = abs(z) * 2.0**-24
        assert 0.2 * unit < spread(got[name], exact[name]) < unit + 2.0**-21, name


@pytest.mark.parametrize("name", ["dg", "dA_log"])
@pytest.mark.parametrize("x, low, high", [(-12.0, 0.0, 4e-6), (12.0, 0.005, 0.2)], ids=["foot", "shoulder"])
def test_slope_of_a_saturated_sigmoid_cancels(name, x, low, high):
    """p (1 - p) in fp32 at x = 12, where 1 - p = 6e-6, is right to a few percent; at x = -12 to roundoffs."""
    assert low <= spread(one_gate(x, 0.0, -5.0, 400)[name], one_gate(x, 0.0, -5.0, 0)[name]) <= high


def test_a_gate_far_past_saturation_has_no_slope_left():
    """1 - p is 0 there in any precision: no multiple of e^A_log = 3e38 may leak into the envelope."""
    got = one_gate(100.0, 88.7, -5.0, 40)
    assert float(got["dg"].abs().max()) == float(got["dA_log"].abs().max()) == 0.0


def test_gate_is_right_to_a_few_fp32_roundoffs_where_it_is_well_conditioned():
    for bound in KINDS.values():
        got, exact = one_gate(0.7, 0.3, bound, 400), one_gate(0.7, 0.3, bound, 0)
        for name in exact:
            assert 2.0**-25 < spread(got[name], exact[name]) < 2.0**-20, name


def test_gate_storage_counts():
    raw = torch.linspace(-3, 3, 50, dtype=torch.float64).view(1, 50, 1, 1)
    coarse, _ = activate_gate(raw, None, None, -5.0, ToFormat(), "bf16")
    assert torch.equal(coarse, coarse.bfloat16().double())
    assert not torch.equal(coarse, activate_gate(raw, None, None, -5.0, ToFormat())[0])


def test_scalar_functions():
    x = torch.tensor([-800.0, -40.0, -1.0, 0.0, 1.0, 40.0, 800.0], dtype=torch.float64)
    with mpmath.workdps(800):
        for value, plus, slope in zip(x.tolist(), softplus(x).tolist(), sigmoid_slope(x).tolist()):
            assert abs(plus - mpmath.log1p(mpmath.exp(mpf(value)))) <= 1e-15 * abs(plus) + NORMAL
            assert abs(slope - mpmath.sech(mpf(value) / 2) ** 2 / 4) <= 1e-15 * slope + NORMAL


@pytest.mark.parametrize("mode", ["plain", "beta_sigmoid", "neg_eigval"])
def test_beta(mode):
    beta = torch.tensor([0.0, 0.3, -2.0, 30.0, -30.0, 1e4, -1e4], dtype=torch.float64).view(1, -1, 1)
    got, adjoint = activate_beta(beta, mode != "plain", mode == "neg_eigval", EXACT)
    factor = {"plain": None, "beta_sigmoid": 1.0, "neg_eigval": 2.0}[mode]
    slope = adjoint(torch.ones_like(beta))
    with mpmath.workdps(6000):
        for value, y, dy in zip(beta.flatten().tolist(), got.flatten().tolist(), slope.flatten().tolist()):
            expected = (mpf(value), mpf(1))
            if factor:
                p = 1 / (1 + mpmath.exp(-mpf(value)))
                expected = (factor * p, factor * p * (1 - p))
            assert abs(y - expected[0]) <= 1e-15 * abs(expected[0]) + NORMAL
            assert abs(dy - expected[1]) <= 1e-14 * abs(expected[1]) + NORMAL


def test_slope_of_a_saturated_beta_cancels():
    beta = torch.full((400, 1, 1), 12.0, dtype=torch.float64)
    _, rounded = activate_beta(beta, True, False, RandomGrids(400))
    _, exact = activate_beta(beta[:1], True, False, EXACT)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert 0.003 < spread(rounded(one), exact(one)) < 0.1


def test_l2norm_and_its_adjoint():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 6, 2, 5, generator=generator, dtype=torch.float64)
    x[:, 1], x[:, 2], x[:, 3] = 0.0, 1e-5 * x[:, 2], 1e15 * x[:, 3]
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    expected = leaf / (leaf.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    (dx,) = torch.autograd.grad(expected, leaf, dy)
    y, adjoint = l2norm(x, "q", EXACT)
    for got, exact in ((y, expected.detach()), (adjoint(dy), dx)):
        scale = exact.abs().amax(-1, keepdim=True)
        assert bool(((got - exact).abs() <= 1e-14 * scale).all())
    assert not bool(y[:, 1].any()) and torch.equal(adjoint(dy)[:, 1], dy[:, 1] * 1e3)


def test_l2norm_storage_counts():
    x = torch.randn(1, 6, 2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, _ = l2norm(x, "q", ToFormat(), "bf16")
    assert torch.equal(y, y.bfloat16().double())


@pytest.mark.parametrize("operand", ["gate", "beta"])
def test_an_approximate_tanh_errs_by_a_share_of_itself_and_saturates(operand):
    """A sigmoid by tanh.approx, right to 2^-11 of the tanh: never below 0 nor past 1, and exact at 1/2."""
    raw = torch.cat([torch.zeros(1), torch.linspace(-12, 12, 97)]).double().view(1, -1, 1, 1)
    rounding = RandomGrids(64)
    raw, spread = raw.expand(64, -1, -1, -1), 2.0**-11 * 0.72 * 2
    if operand == "gate":
        g, _ = activate_gate(raw, None, None, -1.0, rounding, sigmoid=TANH_APPROX)
        p = -g
    else:
        p, _ = activate_beta(raw, True, False, rounding, sigmoid=TANH_APPROX)
    exact = torch.sigmoid(raw)
    error, t = (p - exact).abs(), (2 * exact - 1).abs()
    small = 2.0**-20 * exact
    assert bool((error <= spread * t / 2 + small).all()) and float((p - 1).max()) < 1e-6 and float(p.min()) >= -1e-6
    assert float(error[:, 0].max()) < 1e-6 and float((error / exact)[:, 20].max()) > 1e-3
    plain, _ = activate_beta(raw, True, False, EXACT, sigmoid=TANH_APPROX)
    assert torch.equal(plain, exact)
