"""Authority on refusing second derivatives: the formulas of backward passes have none, and do not pretend to."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


class _Last(torch.autograd.Function):
    """Passes a gradient on; whoever differentiates it by what it came from is refused."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("KDA's gradients have no derivatives: nothing may be differentiated twice through this call")


def once_differentiable(backward: Callable) -> Callable:
    """A formula, called as `backward(ctx, saved tensors, *gradients)`, whose results refuse to be differentiated.

    PyTorch's decorator of that name does so only if an incoming gradient has a graph, and otherwise lets the terms
    vanish: a penalty on the gradients of `o.sum()` would train nothing. What was saved is read once, as activation
    checkpoints demand.
    """

    @functools.wraps(backward)
    def once(ctx, *gradients: Tensor | None):
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():  # no graph of this pass is wanted
            return backward(ctx, saved, *gradients)
        with torch.no_grad():
            made = backward(ctx, saved, *gradients)
        sources = [x for x in (*saved, *gradients) if x is not None and x.requires_grad]
        made = made if isinstance(made, tuple) else (made,)
        return tuple(None if x is None else _Last.apply(x, *sources) for x in made)

    return once
