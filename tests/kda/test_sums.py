"""Sums of backward passes: right, and in an order of their own, so that no other head, tile or length moves a bit."""

import pytest
import torch

from harness.bits import differing_bytes
from kda.sums import sum_slots, sum_tiles


def partial(slots: int, heads: int, width: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.arange(-3.0, 3.0)[:heads, None]
    return (torch.randn(slots, heads, width, generator=generator) * sizes).to(device)


@pytest.mark.parametrize("total", [False, True], ids=["by_channel", "total"])
@pytest.mark.parametrize("slots, width", [(0, 5), (1, 2), (64, 128), (65, 100), (1027, 3)])
def test_slots_are_summed(slots, width, total, device):
    x = partial(slots, 4, width, device)
    exact = x.double().sum((0, -1) if total else 0)
    scale = x.double().abs().sum((0, -1) if total else 0)
    got = sum_slots("gate", x, total)
    assert got.shape == exact.shape and got.dtype == torch.float32
    assert bool(((got.double() - exact).abs() <= 2.0**-20 * scale).all())


@pytest.mark.parametrize("total", [False, True], ids=["by_channel", "total"])
def test_a_head_keeps_its_bits_beside_others(total, device):
    """As a head of 96 with 8192 tokens did not: torch.sum adds in another order where it has more to do."""
    x = partial(2048, 6, 128, device)
    together = sum_slots("gate", x, total)
    for head in range(6):
        alone = sum_slots("gate", x[:, head : head + 1].contiguous(), total)
        assert differing_bytes(together[head : head + 1].contiguous(), alone) == 0


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
def test_tiles_are_added_one_after_the_other(tiles, device):
    x = partial(tiles, 6, 33, device)
    expected = x[0].clone()
    for tile in x[1:]:
        expected += tile
    assert differing_bytes(sum_tiles(x), expected) == 0
