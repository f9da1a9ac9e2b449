"""Authority on the last steps of every backward pass, which all routes share."""

import torch
import triton
from torch import Tensor

from kda import record
from kda.contract import Call
from kda.recurrent_kernels import kda_sum_heads_kernel

SUM_TOKENS = 16  # tokens per program when gradients are summed over tiles and value heads


def allocate_tokens(call: Call, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A token-wise result: a packed batch may end in tokens of no sequence, whose results are 0."""
    make = torch.empty if call.cu_seqlens is None else torch.zeros
    return make(*shape, dtype=dtype, device=call.q.device)


def sum_heads(route: str, partial: Tensor, out: Tensor, x: Tensor | None = None) -> Tensor:
    """Sum partial `[NV, B, T, HV, K]` over tiles and the value heads of a head into out `[B, T, H, K]`.

    With x `[B, T, H, K]` the sum is the gradient of its normalised rows, and out that of x.
    """
    B, T, H, K = out.shape
    if out.numel():
        record.note(route, "kda_sum_heads_kernel", BT=SUM_TOKENS)
        kda_sum_heads_kernel[(triton.cdiv(B * T, SUM_TOKENS) * H,)](
            out if x is None else x,
            partial,
            out,
            B * T,
            H,
            partial.shape[3] // H,
            K,
            partial.shape[0],
            BT=SUM_TOKENS,
            BK=triton.next_power_of_2(K),
            L2NORM=x is not None,
            num_warps=4,
        )
    return out


def query_gradient(call: Call, route: str, partial: Tensor, x: Tensor) -> Tensor:
    """The gradient of q or k `[B, T, H, K]` from that of its rows per value head, through l2norm if in the kernel."""
    return sum_heads(route, partial, torch.empty_like(x), x if call.use_qk_l2norm_in_kernel else None)


def beta_gradient(call: Call, dbeta: Tensor) -> Tensor:
    """Through beta's sigmoid if it is in the kernel; sigmoid'(x) = e^-|x| / (1 + e^-|x|)^2 does not cancel."""
    if call.use_beta_sigmoid_in_kernel:
        e = torch.copysign(call.beta, -1).float().exp_()
        below = (1 + e).square_()
        slope = (e.mul_(call.beta_range) if call.allow_neg_eigval else e).div_(below)
        dbeta = slope.mul_(dbeta).masked_fill_(dbeta == 0, 0)  # rows of no sequence may hold NaN
    return dbeta.to(call.beta.dtype)
