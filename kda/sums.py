"""Authority on the order in which parts of gradients are added up."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda import record, relaunch

SUM_SLOTS = 64  # slots that are added at a time

# NOTE [Order of sums]
# torch.sum chooses the order in which it adds by the shape of the whole tensor, and so by heads that have nothing to do
# with a result. What a backward pass sums here it sums in an order of its own, so that no bit depends on them.


@triton.jit(do_not_specialize=["slots", "HV", "W"])
def kda_sum_slots_kernel(partial, out, slots, HV, W, BS: tl.constexpr, BW: tl.constexpr, TOTAL: tl.constexpr):
    """out `[HV, W]` = sum of partial `[slots, HV, W]` over the slots; TOTAL: out `[HV]`, over W too.

    One program per head: NOTE [Order of sums].
    """
    i_h = tl.program_id(0)
    o_s = tl.arange(0, BS).to(tl.int64)
    o_w = tl.arange(0, BW)
    b_sum = tl.zeros([BS, BW], tl.float32)
    for i_s in range(0, slots, BS):
        m = (i_s + o_s < slots)[:, None] & (o_w < W)[None, :]
        b_sum += tl.load(partial + ((i_s + o_s)[:, None] * HV + i_h) * W + o_w[None, :], mask=m, other=0.0)
    b_sum = tl.sum(b_sum, axis=0)
    if TOTAL:
        tl.store(out + i_h, tl.sum(b_sum, axis=0))
    else:
        tl.store(out + i_h * W + o_w, b_sum, mask=o_w < W)


def sum_slots(route: str, partial: Tensor, total: bool = False) -> Tensor:
    """Sum fp32 partial `[slots, HV, W]` over the slots, into `[HV, W]`; `total`: into `[HV]`."""
    slots, HV, W = partial.shape
    out = partial.new_empty((HV,) if total else (HV, W))
    if HV:
        record.note(route, "kda_sum_slots_kernel", BS=SUM_SLOTS)
        tile = {"BS": SUM_SLOTS, "BW": 1 << (W - 1).bit_length(), "TOTAL": total}
        tile["num_warps"] = 8 if W > 128 else 4  # with 4 a tile this wide spills
        relaunch.launch(kda_sum_slots_kernel, HV, (partial, out, slots, HV, W), tile)
    return out


def sum_tiles(partial: Tensor) -> Tensor:
    """Sum over a short first axis, one after the other: NOTE [Order of sums]."""
    return functools.reduce(torch.add, partial.unbind(0))
