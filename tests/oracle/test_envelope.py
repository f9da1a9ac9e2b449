"""Authority on the statistics: what each of them must let pass, and the fault that it exists for."""

import math

import pytest
import torch

from oracle.envelope import ANCHORED_FLOOR, FLOOR, LIMITS, floor_of, pooled_sigma, statistics
from oracle.rounding import RandomGrids, round_to

N, T, D, M = 2, 24, 16, 8
SIGMA = 1e-6


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXACT = randn(N, T, D, seed=1)
REPLICAS = SIGMA * randn(M, N, T, D, seed=2)


def over(error, exact=EXACT, replicas=REPLICAS, fmt="fp32") -> set[str]:
    """The statistics of `error` that exceed their limits."""
    found = statistics(error, exact, replicas, fmt, RandomGrids(M, 3)).values
    return {name for name, (value, limit) in found.items() if not value <= limit}


class TestPooling:
    def test_is_the_root_mean_square_where_rows_and_columns_agree(self):
        flat = torch.ones(M, N, T, D, dtype=torch.float64) * SIGMA
        assert torch.allclose(pooled_sigma(flat), torch.full((N, T, D), SIGMA, dtype=torch.float64))

    def test_raises_a_lucky_element_never_lowers_one(self):
        own = REPLICAS.square().mean(0).sqrt()
        lucky = REPLICAS.clone()
        lucky[:, 0, 3, 3] *= 0.01
        assert bool((pooled_sigma(REPLICAS) >= own * (1 - 1e-12)).all())
        raised = pooled_sigma(lucky)[0, 3, 3] / lucky[:, 0, 3, 3].square().mean().sqrt()
        assert float(raised) == pytest.approx(math.sqrt(LIMITS.pool_cap))

    def test_zero_stays_zero(self):
        none = REPLICAS.clone()
        none[:, 0, 3, 3] = 0
        assert float(pooled_sigma(none)[0, 3, 3]) == 0
        assert bool((pooled_sigma(torch.zeros_like(REPLICAS)) == 0).all())


@pytest.mark.parametrize("seed", range(10, 30))
def test_an_error_like_the_replicas_passes(seed):
    assert over(SIGMA * randn(N, T, D, seed=seed)) == set()


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_the_rounding_of_the_output_passes(fmt):
    assert over(round_to(EXACT, fmt) - EXACT, fmt=fmt) == set()
    assert over(round_to(EXACT + SIGMA * randn(N, T, D, seed=4), fmt) - EXACT, fmt=fmt) == set()


def changed(change) -> torch.Tensor:
    error = SIGMA * randn(N, T, D, seed=5)
    change(error)
    return error


@pytest.mark.parametrize(
    "fault, caught_by",
    [
        (lambda e: e[0, 5].__setitem__(3, 30 * SIGMA), "element"),
        (lambda e: e[0, 5].add_(8 * SIGMA * randn(D, seed=6).sign()), "row"),
        (lambda e: e[1, :, 2].add_(8 * SIGMA * randn(T, seed=7).sign()), "column"),
        (lambda e: e[1].add_(6 * SIGMA * randn(T, D, seed=8).sign()), "block"),
        (lambda e: e[0, 5].add_(5 * SIGMA * EXACT[0, 5]), "row_gain"),
        (lambda e: e[0, :, 2].add_(5 * SIGMA * EXACT[0, :, 2]), "column_gain"),
        (lambda e: e.add_(2 * SIGMA * EXACT), "block_gain"),
    ],
    ids=["element", "row", "column", "block", "row_gain", "column_gain", "block_gain"],
)
def test_each_statistic_catches_its_fault(fault, caught_by):
    assert caught_by in over(changed(fault))


def test_a_wrong_row_of_the_right_size_is_caught():
    swapped = EXACT.clone()
    swapped[0, [3, 4]] = swapped[0, [4, 3]]
    assert "element" in over(swapped - EXACT)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_where_every_replica_is_exact_only_the_floor_is_allowed(fmt):
    exact, replicas = EXACT.clone(), REPLICAS.clone()
    exact[0, 3], replicas[:, 0, 3] = 0, 0
    error = torch.zeros_like(exact)
    error[0, 3, 1] = FLOOR[fmt]
    assert "element" not in over(error, exact, replicas, fmt)
    error[0, 3, 1] = 1.01 * FLOOR[fmt]
    assert statistics(error, exact, replicas, fmt, RandomGrids(M, 3)).values["element"][0] == math.inf


@pytest.mark.parametrize(
    "name, diagonal, raised",
    [
        ("dk", "anchor_apart", True),
        ("dbeta", "anchor", True),
        ("dk", "halving", False),
        ("dv", "anchor", False),
        ("o", "anchor_apart", False),
        ("dk", None, False),
    ],
)
def test_anchored_pairs_lose_what_their_factors_make_underflow(name, diagonal, raised):
    """2^-149 times the largest factor, for each of 16 pairs; fp16 has a higher floor anyway."""
    assert floor_of(name, "bf16", diagonal) == (2.0 ** (-149 + 58 + 4) if raised else FLOOR["bf16"])
    assert floor_of(name, "fp16", diagonal) == FLOOR["fp16"]
    exact, error = 1e-30 * EXACT, torch.zeros_like(EXACT)
    error[0, 3, 1] = 0.9 * ANCHORED_FLOOR
    how = (exact, 1e-30 * REPLICAS, "fp32", RandomGrids(M, 3))
    for size, inside in ((1, raised), (1.2, False)):
        value, limit = statistics(size * error, *how, floor=floor_of(name, "fp32", diagonal)).values["element"]
        assert (value <= limit) == inside


def test_nan_is_never_inside():
    error = torch.zeros_like(EXACT)
    error[0, 0, 0] = math.nan
    assert "element" in over(error)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 5), (2, 5, 1)], ids=["scalar", "row", "column"])
def test_small_blocks_have_an_envelope_too(shape):
    exact, replicas = randn(*shape, seed=1), SIGMA * randn(M, *shape, seed=2)
    assert over(SIGMA * randn(*shape, seed=3), exact, replicas) == set()
    assert "element" in over(torch.full(shape, 100 * SIGMA, dtype=torch.float64), exact, replicas)


class TestFirstLook:
    def test_few_replicas_have_smaller_limits_and_many_the_usual_ones(self):
        assert [LIMITS.share(m) for m in (2, 4, 8, 40)] == pytest.approx([0.5, math.sqrt(0.5), 1, 1])
        found = statistics(SIGMA * randn(N, T, D, seed=5), EXACT, REPLICAS[:4], "fp32", RandomGrids(M, 3).some(0, 4))
        share = math.sqrt(0.5)
        limits = {name: limit / share for name, (_, limit) in found.values.items()}
        gains = dict.fromkeys(("row_gain", "column_gain", "block_gain"), LIMITS.gain)
        rms = {"row": LIMITS.row, "column": LIMITS.row, "block": LIMITS.block}
        assert limits == pytest.approx({"element": LIMITS.element, **rms, **gains})

    @pytest.mark.parametrize("first", [2, 4])
    def test_what_it_clears_every_replica_clears(self, first):
        """Errors on both sides of each limit, replicas of a common size and of one of their own each."""
        cleared = 0
        for seed in range(200):
            sizes = torch.exp(randn(M, 1, 1, 1, seed=seed)) if seed % 2 else 1.0
            replicas, error = SIGMA * sizes * randn(M, N, T, D, seed=seed + 1000), SIGMA * randn(N, T, D, seed=seed)
            factor = 2.0 ** float(randn(1, seed=seed)[0] * 2 - 1)
            error[0, seed % T] += factor * SIGMA * EXACT[0, seed % T]
            error[0, 3, seed % D] *= 4 * factor
            error[1] *= factor
            some = statistics(error, EXACT, replicas[:first], "fp32", RandomGrids(M, 3).some(0, first)).values
            if all(value <= limit for value, limit in some.values()):
                cleared += 1
                assert over(error, replicas=replicas) == set()
        assert cleared > 10 or first == 2
