"""The activations inside the fused kernels, element by element against float64, and the pairs that carry them."""

import pytest
import torch
import triton
import triton.language as tl

from kda.fused_gate import fast_bounded_gate, fast_gate_adjoint, fast_softplus_gate, split_half

LOG2E = 1.4426950408889634
Z = (-1e4, -300.0, -100.0, -88.0, -40.0, -7.0, -1.0, -1e-3, 0.0, 1e-3, 0.7, 3.0, 20.0, 90.0, 1e4)
A = (-80.0, -3.0, 0.0, 2.7, 80.0, 88.7)


@triton.jit
def gates_kernel(z, A, softplus, bounded, lower_bound, N: tl.constexpr):
    o = tl.arange(0, N)
    b_z, b_A = tl.load(z + o), tl.load(A + o)
    tl.store(softplus + o, fast_softplus_gate(b_z, b_A))
    tl.store(bounded + o, fast_bounded_gate(b_z, b_A, lower_bound))


@triton.jit
def adjoint_kernel(dg, z, A, dz, dA, lower_bound, N: tl.constexpr, GATE: tl.constexpr):
    o = tl.arange(0, N)
    b_dz, b_dA = fast_gate_adjoint(tl.load(dg + o), tl.load(z + o), tl.load(A + o), lower_bound, GATE)
    tl.store(dz + o, b_dz)
    tl.store(dA + o, b_dA)


@triton.jit
def split_kernel(g, hi, lo, N: tl.constexpr):
    o = tl.arange(0, N)
    b_hi, b_lo = split_half(tl.load(g + o))
    tl.store(hi + o, b_hi)
    tl.store(lo + o, b_lo)


def worst(got: torch.Tensor, exact: torch.Tensor, exponent: torch.Tensor) -> float:
    """The largest error over what NOTE [Fast gates] grants; what is beyond fp32 on either side must be so too."""
    fp32 = torch.finfo(torch.float32)
    overflow, vanishes = exact < -fp32.max, exact.abs() < fp32.tiny
    assert bool((got[overflow] == -torch.inf).all()) and bool((got[vanishes].abs() <= 2 * fp32.tiny).all())
    usual = ~(overflow | vanishes)
    granted = 2.0**-20 + 2.0**-22 * exponent.abs()
    return float(((got.double() - exact).abs() / exact.abs() / granted)[usual].max())


def test_activations_keep_their_digits_and_extremes(device):
    z, a = (x.flatten() for x in torch.meshgrid(torch.tensor(Z), torch.tensor(A), indexing="ij"))
    N = triton.next_power_of_2(z.numel())
    pad = lambda x: torch.cat([x, x.new_zeros(N - x.numel())]).to(device)  # noqa: E731
    softplus, bounded = (torch.empty(N, device=device) for _ in range(2))
    gates_kernel[(1,)](pad(z), pad(a), softplus, bounded, -5.0, N=N)
    z, a = z.double(), a.double()
    exact = -LOG2E * torch.where(z < -30, (a + z).exp(), a.exp() * torch.nn.functional.softplus(z))
    assert worst(softplus[: len(z)].cpu(), exact, a.abs() + z.clamp(max=0).abs()) <= 1
    x = a.exp() * z
    exact = -5 * LOG2E * torch.sigmoid(x)
    assert worst(bounded[: len(z)].cpu(), exact, x.clamp(-200, 200) + a) <= 1


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_adjoints_keep_their_digits_and_extremes(gate, device):
    z, a = (x.flatten() for x in torch.meshgrid(torch.tensor(Z), torch.tensor(A), indexing="ij"))
    N, sign = triton.next_power_of_2(z.numel()), 1.0 if gate == "softplus" else -1.0
    pad = lambda x: torch.cat([x, x.new_zeros(N - x.numel())]).to(device)  # noqa: E731
    dz, dA = (torch.empty(N, device=device) for _ in range(2))
    adjoint_kernel[(1,)](pad(sign * torch.ones(z.numel())), pad(z), pad(a), dz, dA, -5.0, N=N, GATE=gate)
    dz, dA = (sign * x[: len(z)].cpu() for x in (dz, dA))
    z, a = z.double(), a.double()
    x, near = a.exp() * z, a.abs() + z.clamp(max=0).abs()
    if gate == "softplus":
        exact = -torch.where(z < -30, (a + z).exp(), a.exp() * torch.sigmoid(z))
        assert worst(dz, exact, near) <= 1
        assert worst(dA, -torch.where(z < -30, (a + z).exp(), a.exp() * torch.nn.functional.softplus(z)), near) <= 1
    else:
        slope = (1 + (-x.abs()).exp()).pow(-2)
        # A product counts where its exponential is a normal number: a GPU has no other ones. Elsewhere e^A e^-|x| is
        # below the smallest one, and x e^-|x| below 104 times that.
        tiny = torch.finfo(torch.float32).tiny
        e = (a - x.abs()).exp()
        m = e >= tiny
        assert worst(dz[m], (-5 * slope * e)[m], (a.abs() + x.abs().clamp(max=200))[m]) <= 1
        assert bool((dz[~m].abs() <= 5 * tiny).all())
        e = (-x.abs()).exp()
        m = e >= tiny
        assert worst((x.sign() * dA)[m], (-5 * slope * e * x.abs())[m], (a.abs() + x.abs())[m]) <= 1
        assert bool((dA[~m].abs() <= 5 * 104 * tiny).all())


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_no_gradient_passes_any_gate(gate, device):
    """dg = 0, as at every reset: dz and dA_log are 0 and not NaN, whatever z and A_log are."""
    z = torch.tensor([-torch.inf, -1e30, 0.0, torch.inf], device=device).repeat(4)
    a = torch.tensor([-80.0, 0.0, 80.0, 88.7], device=device).repeat_interleave(4)
    dz, dA = torch.ones(2, 16, device=device)
    adjoint_kernel[(1,)](torch.zeros_like(z), z, a, dz, dA, -5.0, N=16, GATE=gate)
    assert dz.count_nonzero() == 0 and dA.count_nonzero() == 0


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 7.2, 1e4])
def test_pairs_of_halves_hold_a_gate(scale, device):
    g = -scale * torch.rand(256, generator=torch.Generator().manual_seed(0)).to(device)
    hi, lo = (torch.empty(256, dtype=torch.float16, device=device) for _ in range(2))
    split_kernel[(1,)](g, hi, lo, N=256)
    error = (hi.double() + lo.double() - g.double()).abs()
    assert bool((error <= (g.double().abs() * 2.0**-22).clamp(min=2.0**-25)).all())
