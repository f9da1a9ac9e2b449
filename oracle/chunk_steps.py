"""Authority on the rounded steps of the chunkwise algorithm and their adjoints: products, cumulative gate, inverse."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.recurrence import LOG2E
from oracle.rounding import Rounding

BLOCK = 16


class Rounded(torch.autograd.Function):
    """Rounded forward ('fp64': unchanged); the gradient to `grad_fmt`, fp32 where it stays in registers."""

    @staticmethod
    def forward(ctx, x, rounding, site, fmt, grad_fmt="fp32"):
        ctx.rounding, ctx.site, ctx.grad_fmt = rounding, site, grad_fmt
        return rounding.round(site, x, fmt)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rounding.round(f"{ctx.site}.grad", grad, ctx.grad_fmt), None, None, None, None


class Product(torch.autograd.Function):
    """a @ b with operands in `fmt`, fp32 accumulation; so are the two products of its gradient, in `grad_fmt`.

    `other`: what stands for a in the gradient of b, which may have been rounded on another way.
    """

    @staticmethod
    def forward(ctx, a, b, rounding, site, fmt, grad_fmt, other=None):
        inputs = a, b
        a, b = rounding.round(f"{site}.a", a, fmt), rounding.round(f"{site}.b", b, fmt)
        ctx.other = None if other is None else rounding.round(f"{site}.other", other.detach(), grad_fmt)
        ctx.save_for_backward(*((a, b) if grad_fmt == fmt else inputs))
        ctx.rounding, ctx.site, ctx.fmt, ctx.again = rounding, site, grad_fmt, grad_fmt != fmt
        return accumulated(rounding, site, a, b, fmt)

    @staticmethod
    def backward(ctx, grad):
        (a, b), rounding, site = ctx.saved_tensors, ctx.rounding, ctx.site
        if ctx.again:
            a, b = rounding.round(f"{site}.a.again", a, ctx.fmt), rounding.round(f"{site}.b.again", b, ctx.fmt)
        grad = rounding.round(f"{site}.grad", grad, ctx.fmt)
        da = accumulated(rounding, f"{site}.da", grad, b.mT, ctx.fmt)
        db = accumulated(rounding, f"{site}.db", (a if ctx.other is None else ctx.other).mT, grad, ctx.fmt)
        return da, db, None, None, None, None, None


class PairSums(torch.autograd.Function):
    """Sums over channels of row i `[.., C, K]` times what pair i, j has of j `[.., C, C, K]`, as `Product` rounds."""

    @staticmethod
    def forward(ctx, row, pair, rounding, site, fmt, grad_fmt):
        ctx.save_for_backward(row, pair)
        ctx.rounding, ctx.site, ctx.grad_fmt = rounding, site, grad_fmt
        ctx.again = "" if grad_fmt == fmt else ".again"
        row, pair = PairSums.operands(row, pair, rounding, site, fmt)
        return (row[..., :, None, :] * pair).sum(-1)

    @staticmethod
    def operands(row, pair, rounding, site, fmt, again=""):
        """Both in `fmt`; equal values are rounded alike, whatever they are multiplied with."""
        row = rounding.round(f"chunk.pair.{site}.operand{again}", row, fmt)
        return row, rounding.round(f"chunk.pair.column{again}", pair, fmt)

    @staticmethod
    def backward(ctx, grad):
        row, pair = PairSums.operands(*ctx.saved_tensors, ctx.rounding, ctx.site, ctx.grad_fmt, ctx.again)
        grad = ctx.rounding.round(f"chunk.pair.{ctx.site}.sum.grad", grad, ctx.grad_fmt)[..., None]
        return (grad * pair).sum(-2), grad * row[..., :, None, :], None, None, None, None


def accumulated(rounding: Rounding, site: str, a: Tensor, b: Tensor, fmt: str) -> Tensor:
    """a @ b, accumulated in fp32; beside operands that were rounded further, that error does not count."""
    if not rounding.replicas or fmt != "fp32":
        return a @ b
    return rounding.accumulate(site, a @ b, a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True), 22)


class Solved(torch.autograd.Function):
    """y = R x with R = (I + L)^-1; the gradient of L is of y and of dv = R^T dy as they were stored, in `fmt`."""

    @staticmethod
    def forward(ctx, L, R, x, rounding, fmt):
        y = rounding.round("chunk.y", R @ x, fmt)
        ctx.save_for_backward(R, y)
        ctx.rounding, ctx.fmt = rounding, fmt
        return y

    @staticmethod
    def backward(ctx, grad):
        R, y = ctx.saved_tensors
        dv = ctx.rounding.round("chunk.dv", R.mT @ grad, ctx.fmt)
        return -dv @ y.mT, None, dv, None, None


def added(rounding: Rounding, site: str, x: Tensor, fmt: str) -> Tensor:
    """The sum over the last axis; Triton adds numbers of 16 bits as they are, here two by two."""
    if fmt not in ("fp16", "bf16"):
        return x.sum(-1)
    while x.shape[-1] > 1:
        x = F.pad(x, (0, x.shape[-1] % 2))
        x = rounding.round(f"{site}.{x.shape[-1]}", x[..., ::2] + x[..., 1::2], fmt)
    return x[..., 0]


class Decayed(torch.autograd.Function):
    """decay `[.., K]` times the rows of a state `[.., K, V]`; both it and its gradient go into the decay's gradient as
    they were kept, in `fmt`, and their products in `product_fmt`.
    """

    @staticmethod
    def forward(ctx, decay, state, rounding, fmt, product_fmt):
        ctx.save_for_backward(decay, state)
        ctx.rounding, ctx.fmt, ctx.product_fmt = rounding, fmt, product_fmt
        return decay[..., None] * state

    @staticmethod
    def backward(ctx, grad):
        decay, state = ctx.saved_tensors
        kept, kept_grad = (ctx.rounding.round(f"chunk.kept.{n}", x, ctx.fmt) for n, x in (("S", state), ("dS", grad)))
        products = ctx.rounding.round("chunk.kept.SdS", kept * kept_grad, ctx.product_fmt)
        total = added(ctx.rounding, "chunk.kept.SdS", products, ctx.product_fmt)
        return total, decay[..., None] * grad, None, None, None


class CumulativeGate(torch.autograd.Function):
    """Inclusive cumulative sum in log2 units, in fp32 unless `magnitude` is None; its adjoint is the reversed sum."""

    @staticmethod
    def forward(ctx, g, magnitude, rounding):
        ctx.rounding = rounding
        total = (g * LOG2E).cumsum(-2)
        if magnitude is None:
            return total
        return rounding.accumulate("chunk.cumsum", total, magnitude * math.sqrt(g.shape[-2] / 3))

    @staticmethod
    def backward(ctx, grad):
        reverse = lambda x: x.flip(-2).cumsum(-2).flip(-2) * LOG2E  # noqa: E731
        return ctx.rounding.accumulate("chunk.cumsum.grad", reverse(grad), reverse(grad.abs())), None, None


class Inverse(torch.autograd.Function):
    """R = (I + L)^-1 for strictly lower L; adjoint -tril(R^T dR R^T)."""

    @staticmethod
    def forward(ctx, L, rounding, model):
        R = _neumann(L, rounding) if model.inverse == "neumann" else _substitution(L, rounding, model.merge)
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        R = rounding.round("chunk.inverse.store", R - identity, model.stored_inverse) + identity
        ctx.save_for_backward(R)
        ctx.rounding, ctx.fmt = rounding, model.operand
        return R

    @staticmethod
    def backward(ctx, grad):
        (R,), round_ = ctx.saved_tensors, ctx.rounding.round
        inner = round_("chunk.inverse.inner", round_("chunk.inverse.grad", torch.tril(grad), ctx.fmt) @ R.mT, ctx.fmt)
        return -torch.tril(R.mT @ inner, -1), None, None


def _substitution(L: Tensor, rounding: Rounding, merge: str) -> Tensor:
    """Forward substitution in fp32 inside 16 x 16 blocks, then block merges with operands in `merge`."""
    count = L.shape[-1] // BLOCK
    span = [slice(BLOCK * i, BLOCK * (i + 1)) for i in range(count)]
    identity = torch.eye(BLOCK, dtype=L.dtype, device=L.device)
    diagonal = torch.stack([L[..., block, block] for block in span], -3)
    rows = [identity[0].expand(*diagonal.shape[:-2], BLOCK)]
    for i in range(1, BLOCK):
        row = identity[i] - (diagonal[..., i : i + 1, :i] @ torch.stack(rows, -2)).squeeze(-2)
        rows.append(rounding.round("chunk.inverse.row", row, "fp32"))
    solved, R, blocks = torch.stack(rows, -2), torch.zeros_like(L), {}
    operand = lambda name, x: rounding.round(f"chunk.inverse.{name}", x, merge)  # noqa: E731
    for i in range(count):
        R[..., span[i], span[i]] = blocks[i, i] = solved[..., i, :, :]
        for j in range(i - 1, -1, -1):
            inner = sum(operand("L", L[..., span[i], span[m]]) @ operand("R", blocks[m, j]) for m in range(j, i))
            R[..., span[i], span[j]] = blocks[i, j] = -(operand("outer", blocks[i, i]) @ operand("inner", inner))
    return R


def _neumann(L: Tensor, rounding: Rounding) -> Tensor:
    """The doubling series prod (I + (-L)^(2^n)) in fp16: not to be imitated, kept as a model of kernels that do it."""
    half = lambda name, x: rounding.round(f"chunk.neumann.{name}", x, "fp16")  # noqa: E731
    power = -half("L", L)
    R = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device) + power
    for _ in range(int(math.log2(L.shape[-1])) - 1):
        power = half("square", power @ power)
        R = half("sum", R + half("product", R @ power))
    return R
