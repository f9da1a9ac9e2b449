"""Authority on comparing tensors bit by bit, NaN and signed zero included."""

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor in its logical order."""
    # A single element counts as contiguous whatever its stride, and then has no bytes to view.
    return x.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def differing_bytes(a: Tensor, b: Tensor) -> int:
    """How many bytes differ between two tensors of one shape and dtype."""
    return int((as_bytes(a) != as_bytes(b)).sum())
