"""Eager calls as PyTorch code makes them: aliases, views, missing pieces, checkpoints, autocast, refused transforms."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kda

ROUTES = ("fused-unbounded", "chunk-unbounded", "recurrent", "torch")
T, HV = 6, 2
each_route = pytest.mark.parametrize("route", ROUTES)


def tensors(route: str, device: str, tokens: int = T) -> dict[str, torch.Tensor]:
    K, V, dtype = (64, 64, torch.bfloat16) if route.startswith("fused") else (8, 8, torch.float32)
    generator = torch.Generator().manual_seed(3)
    rows = lambda *shape: torch.randn(1, tokens, *shape, generator=generator).to(dtype)  # noqa: E731
    made = {"q": rows(HV, K), "k": rows(HV, K), "v": rows(HV, V), "g": -rows(HV, K).abs(), "beta": rows(HV).sigmoid()}
    made["initial_state"] = torch.randn(1, HV, K, V, generator=generator)
    return {name: x.to(device).requires_grad_() for name, x in made.items()}


def run(route: str, call: dict[str, torch.Tensor], **rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    with kda.force_route(route):
        return kda.chunk_kda(**call, output_final_state=True, use_qk_l2norm_in_kernel=True, **rest)


def gradients(results, call: dict[str, torch.Tensor], *incoming: torch.Tensor) -> list[torch.Tensor]:
    incoming = incoming or [torch.ones_like(x) for x in results]
    return list(torch.autograd.grad(results, list(call.values()), incoming, allow_unused=True, materialize_grads=True))


@each_route
def test_one_tensor_as_two_arguments_gets_both_gradients(route, device):
    call = tensors(route, device)
    apart = {**call, "k": call["q"].detach().clone().requires_grad_(), "v": call["q"].detach().clone().requires_grad_()}
    separate = dict(zip(apart, gradients(run(route, apart), apart)))
    shared = {name: x for name, x in call.items() if name not in ("k", "v")}
    results = run(route, {**shared, "k": call["q"], "v": call["q"]})
    made = dict(zip(shared, gradients(results, shared)))
    parts = [separate[name] for name in ("q", "k", "v")]
    orders = [(parts[i] + parts[j]) + parts[3 - i - j] for i, j in ((0, 1), (0, 2), (1, 2))]  # autograd adds in any
    assert any(torch.equal(made["q"], total) for total in orders)
    assert torch.equal(made["g"], separate["g"])


@each_route
def test_expanded_arguments_and_gradients_are_what_their_copies_are(route, device):
    call = tensors(route, device)
    call["beta"] = call["beta"].detach()[:, :, :1].expand(1, T, HV).requires_grad_()
    call["g"] = call["g"].detach()[:, :1].expand_as(call["g"]).requires_grad_()
    copies = {name: x.detach().clone().contiguous().requires_grad_() for name, x in call.items()}
    views, dense = run(route, call), run(route, copies)
    assert all(map(torch.equal, views, dense))
    incoming = [torch.full((), 0.5, dtype=x.dtype, device=device).expand_as(x) for x in views]
    expected = gradients(dense, copies, *(x.contiguous() for x in incoming))
    assert all(map(torch.equal, gradients(views, call, *incoming), expected))


@each_route
def test_slices_of_one_buffer_and_a_transposed_gradient(route, device):
    call = tensors(route, device)
    buffer = torch.cat([call[name].detach() for name in ("q", "k", "v")], -1).requires_grad_()
    q, k, v = buffer.split([call[name].shape[-1] for name in ("q", "k", "v")], -1)
    sliced, dense = run(route, {**call, "q": q, "k": k, "v": v}), run(route, call)
    assert all(map(torch.equal, sliced, dense))
    do = torch.randn(*dense[0].mT.shape, device=device).to(dense[0].dtype).mT
    (made,) = torch.autograd.grad(sliced[0], buffer, do)
    expected = torch.autograd.grad(dense[0], [call[name] for name in ("q", "k", "v")], do.contiguous())
    assert torch.equal(made, torch.cat(expected, -1))


@each_route
def test_negated_views_are_their_values(route, device):
    """As the imaginary part of a conjugate is: its memory holds the opposites, and contiguous() leaves it so."""
    call = tensors(route, device)
    views = {name: torch._neg_view(-x.detach()).requires_grad_() for name, x in call.items()}
    assert all(x.is_neg() and x.is_contiguous() for x in views.values())
    negated, dense = run(route, views), run(route, call)
    assert all(map(torch.equal, negated, dense))
    incoming = [torch.ones_like(x) for x in dense]
    made = gradients(negated, views, *(torch._neg_view(-x) for x in incoming))
    assert all(map(torch.equal, made, gradients(dense, call, *incoming)))


def test_negated_views_of_the_gate_are_their_values(device):
    g, A_log, dt_bias = torch.randn(1, T, HV, 8), torch.randn(HV), torch.randn(HV * 8)
    given = [x.to(device) for x in (g, A_log, dt_bias)]
    made, expected = kda.fused_kda_gate(*(torch._neg_view(-x) for x in given)), kda.fused_kda_gate(*given)
    assert torch.equal(made, expected)


@each_route
def test_no_tokens_and_no_sequences(route, device):
    call = tensors(route, device, tokens=0)
    o, state = run(route, call)
    assert o.shape == call["v"].shape and torch.equal(state, call["initial_state"])
    assert state.data_ptr() != call["initial_state"].data_ptr(), "a result must not be an alias of an argument"
    made = dict(zip(call, gradients((o, state), call)))
    assert torch.equal(made["initial_state"], torch.ones_like(state)) and made["q"].shape == call["q"].shape

    call = tensors(route, device)
    call["initial_state"] = call["initial_state"].detach()[:0].requires_grad_()
    o, state = run(route, call, cu_seqlens=torch.zeros(1, dtype=torch.int64, device=device))
    assert not o.any() and state.shape == call["initial_state"].shape
    made = dict(zip(call, gradients((o, state), call)))
    assert not any(x.any() for x in made.values())


@each_route
def test_offsets_edited_in_place_are_read_again(route, device):
    call = tensors(route, device)
    call["initial_state"] = call["initial_state"].detach().expand(2, -1, -1, -1).contiguous().requires_grad_()
    offsets = torch.tensor([0, 2, T], device=device)
    first = run(route, call, cu_seqlens=offsets)
    dense = run(route, {**call, "initial_state": call["initial_state"][:1]})
    offsets[1] = 5
    edited, fresh = run(route, call, cu_seqlens=offsets), run(route, call, cu_seqlens=offsets.clone())
    assert all(map(torch.equal, edited, fresh))
    assert not torch.equal(edited[0], first[0]) and not torch.equal(edited[0], dense[0])


@each_route
def test_a_checkpointed_call_has_the_same_gradients(route, device):
    call = tensors(route, device)
    plain = gradients(run(route, call), call)
    names = list(call)
    again = checkpoint(lambda *xs: run(route, dict(zip(names, xs))), *call.values(), use_reentrant=False)
    assert all(map(torch.equal, gradients(again, call), plain))


@each_route
def test_autocast_changes_no_bit(route, device):
    """Formats are those of the tensors: whoever wants half precision passes it."""
    call = tensors(route, device)
    plain = run(route, call)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        casting = run(route, call)
        made = gradients(casting, call)
    assert all(map(torch.equal, casting, plain))
    assert all(map(torch.equal, made, gradients(plain, call)))


@pytest.mark.parametrize("wanted", ["k", "g", "initial_state"])
@each_route
def test_second_derivatives_are_refused_and_never_dropped(route, wanted, device):
    call = tensors(route, device)
    (first,) = torch.autograd.grad(run(route, call)[0].sum(), call[wanted], create_graph=True)
    penalty = first.float().square().sum()
    with pytest.raises(RuntimeError, match="nothing may be differentiated twice through this call"):
        torch.autograd.grad(penalty, call["g"], allow_unused=True)


def vmapped(call: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = [torch.stack([call[name].detach()] * 2) for name in ("q", "k", "v", "g", "beta")]
    return torch.vmap(lambda *xs: kda.chunk_kda(*xs)[0])(*rows)


def differentiated(call: dict[str, torch.Tensor]) -> torch.Tensor:
    plain = {name: x.detach() for name, x in call.items()}
    return torch.func.grad(lambda q: kda.chunk_kda(**{**plain, "q": q})[0].float().sum())(plain["q"])


def with_tangent(call: dict[str, torch.Tensor]) -> torch.Tensor:
    plain = {name: x.detach() for name, x in call.items()}
    with forward_ad.dual_level():
        return kda.chunk_kda(**{**plain, "q": forward_ad.make_dual(plain["q"], plain["q"])})[0]


@pytest.mark.parametrize("transform", [vmapped, differentiated, with_tangent], ids=["vmap", "func_grad", "forward_ad"])
@each_route
def test_transforms_are_refused(route, transform, device):
    with (
        kda.force_route(route),
        kda.record_launches() as launches,
        pytest.raises(TypeError, match=r"q is under a torch\.func transform or forward-mode differentiation"),
    ):
        transform(tensors(route, device))
    assert launches == []


def test_the_gate_refuses_transforms(device):
    with pytest.raises(TypeError, match=r"g is under a torch\.func transform"):
        torch.vmap(lambda g: kda.fused_kda_gate(g, torch.zeros(HV)))(torch.zeros(2, 1, T, HV, 4))
