"""Kernels that are wrong in one other form of a call each, by the variant's name, and the one that is right."""

from types import SimpleNamespace

import torch

import kda


def right(**kwargs):
    with kda.force_route("torch"):
        return kda.chunk_kda(**kwargs)


def off_by(fault):
    """A kernel whose o has that much added, of its arguments."""

    def wrong(**kwargs):
        o, *rest = right(**kwargs)
        return (o + fault(o, **kwargs), *rest)

    return wrong


def gradient_of_all(**kwargs):
    """The same values, but the gradient of each token of v is shared by all."""
    mean = kwargs["v"].mean(1, keepdim=True)
    return right(**{**kwargs, "v": kwargs["v"] + (mean - mean.detach())})


def gradient_plus(**kwargs):
    kwargs["v"].register_hook(lambda grad: grad + 1)
    return right(**kwargs)


def as_if_dense(**kwargs):
    q = kwargs["q"]
    return right(**{**kwargs, "q": q.as_strided(q.shape, torch.empty(q.shape).stride())})


def refuses_views(**kwargs):
    if not all(x.is_contiguous() for x in kwargs.values() if isinstance(x, torch.Tensor)):
        raise RuntimeError("invalid stride")
    return right(**kwargs)


WRONG = SimpleNamespace(
    scaled_values=off_by(lambda o, **_: 1e-6),
    scaled_loss=gradient_plus,
    negated_queries=off_by(lambda o, **_: 1e-6),
    negated_keys=off_by(lambda o, **_: 1e-6),
    strided=as_if_dense,
    nan_filled=off_by(lambda o, **_: 0 * torch.empty(1)),
    causal=off_by(lambda o, v, **_: v.mean(1, keepdim=True)),
    causal_gradients=gradient_of_all,
    alone=off_by(lambda o, v, **_: v.sum((0, 1), keepdim=True)),
    packed=off_by(lambda o, cu_seqlens=None, **_: 0.0 if cu_seqlens is None else 1e-6),
    nan_tail=off_by(lambda o, v, **_: 0 * v.sum()),
    nan_sequence=off_by(lambda o, v, **_: 0 * v.sum((0, 1), keepdim=True)),
    nan_head=off_by(lambda o, v, **_: 0 * v.sum(2, keepdim=True)),
    head_alone=off_by(lambda o, v, **_: v.sum(2, keepdim=True)),
)

# Within rounding in either form: only the two together show it.
odd = SimpleNamespace(chunk_kda=off_by(lambda o, k, **_: 1e-7 * (k.sum() > 0)))
plain = SimpleNamespace(chunk_kda=right)
