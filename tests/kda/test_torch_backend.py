"""The PyTorch backend beyond working precision: float64, its gradients, resets, and half inputs."""

import math

import pytest
import torch

import kda
from harness.problem import Problem

LOGITS = {"beta_sigmoid": True, "beta": "gauss"}
FULL = {"q": "gauss", "k": "gauss", "v": "gauss", "g": "gauss", "h0": "gauss", "do": "gauss", "dht": "gauss"}
FULL |= {"lengths": (6, 0, 5), "packed": True, "tail": 2, "heads": 1, "group": 2, "K": 3, "V": 2, "initial_state": True}
GATES = {
    "softplus": {"A_log": "gauss", "dt_bias": "gauss"},
    "lower_bound": {"lower_bound": -5.0, "A_log": "gauss", "dt_bias": "gauss"},
    "pregated": {"g": "mild"},
}


@pytest.fixture(autouse=True)
def torch_route():
    with kda.force_route("torch"):
        yield


def double_call(gate: str) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """A small packed call in float64: its differentiable tensors in the order of `evaluate`, and its keywords."""
    from harness.problem import materialise
    from harness.subject import DIFFERENTIABLE, keywords

    case = materialise(Problem(**{**FULL, **LOGITS, **GATES[gate]}, gate=gate, l2norm=True, neg_eigval=True))
    leaves = {n: x.double().requires_grad_() for n in DIFFERENTIABLE if (x := case.inputs.get(n)) is not None}
    return leaves, keywords(case, "recurrent")


@pytest.mark.parametrize("gate", GATES)
def test_torch_float64_gradients(gate):
    """gradcheck of o and the final state with respect to every tensor of a ragged packed call."""
    leaves, words = double_call(gate)

    def evaluate(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return kda.fused_recurrent_kda(**dict(zip(leaves, tensors)), **words)

    o, ht = evaluate(*leaves.values())
    assert o.dtype == ht.dtype == torch.float64
    assert torch.autograd.gradcheck(evaluate, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_torch_float64_gate_gradients(gate):
    g = torch.tensor([-60.0, -41.0, -39.0, -3.0, 0.0, 2.0, 45.0]).double().view(1, 1, 1, 7).requires_grad_()
    A_log = torch.tensor([-0.5]).double().requires_grad_()
    dt_bias = torch.linspace(-1, 1, 7).double().requires_grad_()
    bound = -5.0 if gate == "lower_bound" else None
    evaluate = lambda *x: kda.fused_kda_gate(*x, bound, torch.float64)  # noqa: E731
    assert torch.autograd.gradcheck(evaluate, (g, A_log, dt_bias))


def test_torch_states_of_a_float64_call_are_float64():
    leaves, words = double_call("pregated")
    *_, h = kda.chunk_kda(**leaves, **words, return_intermediate_states=True, chunk_size=32)
    assert h.dtype == torch.float64
    assert torch.equal(h[0], leaves["initial_state"][[0, 2]].detach())


@pytest.mark.parametrize("gate", [-math.inf, -1e6], ids=["inf", "underflow"])
def test_torch_reset_forgets_everything(gate):
    """After a reset nothing before it matters, its own gradient is exactly 0, and an infinite state does no harm."""
    g = torch.full((1, 3, 1, 2), -0.1)
    g[:, 1] = gate
    call = {"q": torch.ones(1, 3, 1, 2), "k": torch.ones(1, 3, 1, 2), "v": torch.ones(1, 3, 1, 2), "g": g}
    call |= {"beta": torch.ones(1, 3, 1), "initial_state": torch.full((1, 1, 2, 2), math.inf)}
    call = {name: x.requires_grad_() for name, x in call.items()}
    o, ht = kda.fused_recurrent_kda(**call, output_final_state=True)
    assert bool(torch.isfinite(o[:, 1:]).all()) and bool(torch.isfinite(ht).all())
    grads = torch.autograd.grad(
        [o, ht],
        list(call.values()),
        [torch.ones_like(o) * torch.tensor([0, 1, 1]).view(1, 3, 1, 1), torch.ones_like(ht)],
    )
    found = dict(zip(call, grads))
    assert not bool(found["g"][:, 1].any()) and not bool(found["initial_state"].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_torch_computes_half_inputs_in_fp32(dtype):
    """Half-precision tensors give the fp32 result of the same values, rounded once."""
    leaves, words = double_call("softplus")
    half = {
        n: x.detach().to(torch.float32 if n in ("A_log", "dt_bias", "initial_state") else dtype)
        for n, x in leaves.items()
    }
    o, ht = kda.fused_recurrent_kda(**half, **words)
    full_o, full_ht = kda.fused_recurrent_kda(**{n: x.float() for n, x in half.items()}, **words)
    assert torch.equal(o, full_o.to(dtype)) and torch.equal(ht, full_ht)
