"""Authority on guard bands: tensors given to a call inside larger allocations, and what it did to the bytes of them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.bits import differing_bytes

BAND = 2**16  # bytes on either side: a chunk of rows of ordinary heads, and a multiple of every alignment
FILL = 0xFF  # NaN in every format, and -1 in every integer


@dataclass(frozen=True)
class Banded:
    """`tensor` has the values, shape and strides of `original` and is what a call gets; around it, in `buffer`
    (uint8 `[band + bytes of the storage + band]`), every byte is FILL.
    """

    name: str
    original: Tensor
    tensor: Tensor
    buffer: Tensor
    band: int

    @property
    def storage(self) -> Tensor:
        """The bytes that stand for the storage of the original."""
        return self.buffer[self.band : len(self.buffer) - self.band]

    def bands(self) -> tuple[Tensor, Tensor]:
        return self.buffer[: self.band], self.buffer[len(self.buffer) - self.band :]

    def touched(self) -> Tensor:
        """bool `[]`: any byte is not what it was."""
        before, behind = self.bands()
        return ((before != FILL) | (behind != FILL)).any() | (self.storage != _storage(self.original)).any()

    def modified(self) -> bool:
        """Whether an element is not what it was."""
        return bool(differing_bytes(self.original, self.tensor))

    def overrun(self) -> str | None:
        """What was written where no element is, None if nothing was."""
        before, behind = (band != FILL for band in self.bands())
        said = []
        for where, changed in (("before", before.flip(0)), ("behind", behind)):
            if bool(changed.any()):
                far = int(changed.nonzero()[0])
                said.append(f"{int(changed.sum())} bytes {where} argument {self.name}, the first {far} bytes away")
        between = self._between()
        said += [f"{between} bytes between the elements of argument {self.name}"] if between else []
        return f"the call wrote {' and '.join(said)}" if said else None

    def _between(self) -> int:
        """Bytes of the storage that changed and belong to no element."""
        after = self.storage.clone()
        _view(after, self.original, 0).copy_(self.original)
        return int((after != _storage(self.original)).sum())


def embed(name: str, x: Tensor) -> Banded:
    """A copy of x, its whole storage included, with a band on either side."""
    held, band = _storage(x), _width()
    buffer = torch.full((len(held) + 2 * band,), FILL, dtype=torch.uint8, device=x.device)
    buffer[band : band + len(held)].copy_(held)
    return Banded(name, x, _view(buffer, x, band), buffer, band)


def touched(banded: Iterable[Banded]) -> list[Banded]:
    """Those of which a byte has changed, with one answer from the device for all of them."""
    banded = list(banded)
    flags = torch.stack([one.touched() for one in banded]).tolist() if banded else []
    return [one for one, flag in zip(banded, flags) if flag]


def _width() -> int:
    """None under compute-sanitizer, where each tensor is an allocation of its own: a band would hide its ends."""
    return 0 if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") else BAND


def _storage(x: Tensor) -> Tensor:
    """uint8 `[bytes of the storage]`, the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())


def _view(buffer: Tensor, like: Tensor, offset: int) -> Tensor:
    """The bytes of `buffer` from `offset` on as what `like` is of its own storage."""
    first = offset // like.element_size() + like.storage_offset()
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(buffer.untyped_storage(), first, like.shape, like.stride())
