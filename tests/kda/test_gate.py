"""`fused_kda_gate`, both activations, on every route: against the oracle, its range, its extremes, and bit by bit."""

import math

import pytest
import torch

import kda
from harness.bits import differing_bytes
from harness.problem import Problem

ROUTES = ("gate", "torch")
PARTS = {"forward": {"o"}, "gradients": {"dg", "dA_log", "ddt_bias"}}
SOFTPLUS = {"entry": "gate", "gate": "softplus", "A_log": "gauss", "do": "gauss"}
BOUNDED = {"entry": "gate", "gate": "lower_bound", "lower_bound": -5.0, "A_log": "gauss", "do": "gauss"}

PROBLEMS = [
    Problem(**SOFTPLUS, lengths=(9,), heads=3, K=8, g="gauss", dt_bias="gauss"),
    Problem(**BOUNDED, lengths=(9,), heads=3, K=8, g="gauss", dt_bias="gauss"),
    Problem(**SOFTPLUS, lengths=(33, 33), heads=2, K=100, g="gauss", dt_bias="kimi", gate_dtype="bf16"),
    Problem(**BOUNDED, lengths=(33, 33), heads=2, K=100, g="gauss", gate_dtype="fp16"),
    Problem(**{**BOUNDED, "A_log": None, "lower_bound": -0.3}, lengths=(5,), K=1, g="raw_30"),
    Problem(**{**BOUNDED, "lower_bound": -1000.0}, lengths=(5,), K=256, g="gauss"),
    Problem(**SOFTPLUS, lengths=(40,), K=4, g="raw_30", dt_bias="gauss"),
    *(
        Problem(**{**base, "A_log": A_log}, lengths=(40,), heads=2, K=4, g=raw)
        for base in (SOFTPLUS, BOUNDED)
        for A_log in ("extreme_80", "extreme_minus_80")
        for raw in ("raw_30", "raw_100", "raw_1e4")
    ),
]
CASES = [
    (route, problem, part)
    for route in ROUTES
    for problem in PROBLEMS
    for part, quantities in PARTS.items()
    if quantities & problem.quantities()
]
FACTORS = [-80.0, -1.0, 0.0, 5.0, 80.0, 88.7]
RAW = [-1e4, -200.0, -100.0, -89.0, -80.5, -79.5, -30.0, -1.0, 0.0, 1.0, 30.0, 79.5, 200.0, 1e4]
MODES = {"softplus": None, "lower_bound": -5.0}


@pytest.mark.parametrize("route, problem, part", CASES)
def test_gate(route, problem, part, judge):
    verdicts = judge(route, problem)
    wanted = PARTS[part] & problem.quantities()
    assert verdicts.keys() >= wanted, "a quantity was not judged"
    assert [str(verdicts[name]) for name in sorted(wanted) if verdicts[name].klass != "OK"] == []


def grid(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every raw value with every factor: g `[1, 1, factors, values]`, A_log `[factors]`."""
    A_log = torch.tensor(FACTORS, device=device)
    return torch.tensor(RAW, device=device).expand(1, 1, len(FACTORS), -1).contiguous(), A_log


def activated(g: torch.Tensor, A_log: torch.Tensor, bound: float | None) -> torch.Tensor:
    """The definition, in float64, written so that only a true overflow overflows."""
    z, A = g.double(), A_log.double()[:, None]
    if bound is not None:
        return bound * torch.sigmoid(A.exp() * z)
    return -A.exp() * (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_gate_extremes_stay_in_range(route, mode, device):
    """Finite wherever fp32 can hold the exact value, and inside [lower_bound, 0] always."""
    g, A_log = grid(device)
    with kda.force_route(route):
        y = kda.fused_kda_gate(g, A_log, lower_bound=MODES[mode])
    exact = activated(g, A_log, MODES[mode])
    holdable = exact.abs() < torch.finfo(torch.float32).max
    assert torch.equal(torch.isfinite(y), holdable)
    assert bool((y <= 0).all()) and bool((y >= (MODES[mode] or -math.inf)).all())
    assert not bool(((y == 0) & (exact < -torch.finfo(torch.float32).tiny)).any())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_gate_extreme_gradients_are_finite(route, mode, device):
    """Wherever float64 says that fp32 can hold the gradient, it is there; a zero gradient in gives zero out."""
    g, A_log = grid(device)
    leaf, exact_leaf = g.clone().requires_grad_(), g.double().requires_grad_()
    activated(exact_leaf, A_log, MODES[mode]).sum().backward()
    with kda.force_route(route):
        y = kda.fused_kda_gate(leaf, A_log, lower_bound=MODES[mode])
        (dg,) = torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True)
        (zero,) = torch.autograd.grad(y, leaf, torch.zeros_like(y))
    holdable = exact_leaf.grad.abs() < torch.finfo(torch.float32).max
    assert torch.equal(torch.isfinite(dg), holdable)
    assert bool((zero == 0).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_gate_dA_log_of_cancelling_overflows(route, mode, device):
    """Terms that overflow one by one, and whose sum is 0: the sum is 0, not NaN."""
    g = torch.full((1, 2, 1, 1), 1e4, device=device)
    A_log = torch.tensor([80.0], device=device, requires_grad=True)
    do = torch.tensor([1.0, -1.0], device=device).view(1, 2, 1, 1)
    with kda.force_route(route):
        kda.fused_kda_gate(g, A_log, lower_bound=MODES[mode]).backward(do)
    assert A_log.grad.item() == 0


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_gate_output_dtype_is_the_rounded_fp32_result(route, mode, output_dtype, device):
    g = torch.linspace(-9, 9, 36, device=device).view(1, 3, 2, 6)
    A_log, dt_bias = torch.tensor([0.5, -1.0], device=device), torch.linspace(-1, 1, 12, device=device)
    with kda.force_route(route):
        y = kda.fused_kda_gate(g, A_log, dt_bias, MODES[mode], output_dtype)
        full = kda.fused_kda_gate(g, A_log, dt_bias, MODES[mode])
    assert y.dtype == output_dtype and torch.equal(y, full.to(output_dtype))


@pytest.mark.parametrize("mode", MODES)
def test_gate_layouts_and_repeats_agree_bitwise(mode, device):
    """Strided and expanded tensors and gradients give the bits of dense ones; so does a second call."""
    g = torch.linspace(-9, 9, 2 * 35 * 2 * 6, device=device).view(2, 35, 2, 6)
    A_log, dt_bias = torch.tensor([0.5, -1.0], device=device), torch.linspace(-1, 1, 12, device=device)
    do = torch.linspace(1, 2, 6, device=device).expand_as(g)

    def run(*tensors: torch.Tensor, incoming: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        with kda.force_route("gate"):
            y = kda.fused_kda_gate(*leaves, MODES[mode])
            return [y, *torch.autograd.grad(y, leaves, incoming)]

    strided = g.transpose(1, 2).contiguous().transpose(1, 2)
    dense = run(g, A_log, dt_bias, incoming=do.contiguous())
    for other in (
        run(g, A_log, dt_bias, incoming=do.contiguous()),
        run(strided, A_log.repeat_interleave(2)[::2], dt_bias.repeat_interleave(3)[::3], incoming=do),
    ):
        assert [differing_bytes(a, b) for a, b in zip(dense, other)] == [0] * 4


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4)], ids=["no_batch", "no_tokens"])
@pytest.mark.parametrize("route", ROUTES)
def test_gate_of_nothing(route, shape, device):
    g = torch.zeros(shape, device=device, requires_grad=True)
    A_log = torch.zeros(2, device=device, requires_grad=True)
    with kda.force_route(route):
        y = kda.fused_kda_gate(g, A_log)
        y.sum().backward()
    assert y.shape == g.grad.shape == shape and torch.equal(A_log.grad, torch.zeros_like(A_log))


@pytest.mark.parametrize("route", ROUTES)
def test_gate_refuses_a_second_derivative(route, device):
    g = torch.zeros(1, 1, 1, 1, device=device, requires_grad=True)
    with kda.force_route(route):
        y = kda.fused_kda_gate(g, torch.zeros(1, device=device))
        (dg,) = torch.autograd.grad(y.sum(), g, create_graph=True)
        with pytest.raises(RuntimeError, match="may be differentiated twice"):
            torch.autograd.grad(dg.sum(), g)
