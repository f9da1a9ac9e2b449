"""Authority on rounding: grids agree with hardware casts, and a replica rounds as a function of the value."""

import math

import pytest
import torch

from oracle import rounding
from oracle.rounding import EXACT, PRECISION_BITS, RandomGrids, ToFormat, round_to

ODD_REPLICAS = [m for m in range(16) if m % 4]
SPANS = ((8, 16), (0, 1), (1, 4), (4, 5), (5, 8))


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite positive values of a 16-bit format, ascending, float64."""
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).double()
    return values[torch.isfinite(values)]


def with_midpoints(values: torch.Tensor) -> torch.Tensor:
    """Values, midpoints of neighbours and the float32 numbers around both, of both signs: exact in float32."""
    middle = ((values[1:] + values[:-1]) / 2).float()
    near = torch.cat([values.float(), middle])
    around = [torch.nextafter(near, torch.tensor(side)) for side in (math.inf, -math.inf)]
    positive = torch.cat([near, *around]).double()
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("dtype, fmt", [(torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=["bf16", "fp16"])
def test_every_value_midpoint_and_neighbour_rounds_as_the_cast(dtype, fmt):
    values = every_value(dtype)
    x = with_midpoints(values)
    smallest = 2.0**-126 if fmt == "bf16" else 0.0  # the bf16 model has no subnormals
    x = x[(x.abs() >= smallest) & (x.abs() <= float(values.max()))]
    assert x.numel() > 150_000
    assert torch.equal(round_to(x, fmt), x.float().to(dtype).double())


@pytest.mark.parametrize(
    "x, expected",
    [
        (1 + 2**-11 + 2**-40, 1 + 2**-10),
        (1 + 2**-11, 1.0),
        (1 + 3 * 2**-11, 1 + 2**-9),
        (1.5 * 2**-24 + 2**-60, 2**-23),
        (2**-25, 0.0),
        (65519.999, 65504.0),
        (65520.0, math.inf),
        (-70000.0, -math.inf),
    ],
    ids=[
        "above_midpoint",
        "midpoint_down",
        "midpoint_up",
        "subnormal",
        "half_smallest",
        "below_inf",
        "inf",
        "minus_inf",
    ],
)
def test_fp16_rounds_once(x, expected):
    """A cast of float64 that goes through float32 rounds twice, and misses what lies just beyond a midpoint."""
    assert round_to(torch.tensor([x], dtype=torch.float64), "fp16").item() == expected


def test_fp32_rounds_as_the_cast():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, generator=generator, dtype=torch.float64) * torch.exp2(
        torch.randint(-90, 90, (20_000,), generator=generator).double()
    )
    single = x.float()
    middle = (single.double() + torch.nextafter(single, torch.tensor(math.inf)).double()) / 2
    for values in (x, middle):
        assert torch.equal(round_to(values, "fp32"), values.float().double())


def test_tf32_truncates():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) * 3
    assert torch.equal(round_to(x.double(), "tf32"), (x.view(torch.int32) & -8192).view(torch.float32).double())


def test_exact_rounding_changes_nothing():
    x = torch.randn(5, dtype=torch.float64)
    assert EXACT.round("a", x, "bf16") is x and EXACT.accumulate("a", x, x) is x and EXACT.constant("a", 1.0, x) == 1.0


def test_to_format_is_the_cast_with_a_replica_dimension():
    x = torch.randn(1, 7, dtype=torch.float64)
    assert ToFormat.replicas == 1
    assert torch.equal(ToFormat().round("a", x, "bf16"), x.float().to(torch.bfloat16).double())


def spread(x: torch.Tensor, replicas: int = 16) -> torch.Tensor:
    return x.expand(replicas, *x.shape)


@pytest.mark.parametrize("fmt", ["fp32", "tf32", "fp16", "bf16"])
class TestRandomGrids:
    def test_every_fourth_replica_is_the_formats_own_grid(self, fmt):
        x = torch.randn(200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        rounded = RandomGrids(16, 5).round("site", spread(x), fmt)
        assert all(torch.equal(rounded[m], round_to(x, fmt)) for m in range(0, 16, 4))
        assert not any(torch.equal(rounded[m], round_to(x, fmt)) for m in ODD_REPLICAS)

    def test_errors_stay_within_an_ulp_and_are_about_as_large(self, fmt):
        x = torch.rand(4000, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 1
        errors = (RandomGrids(16, 6).round("site", spread(x), fmt) / x - 1)[ODD_REPLICAS]
        unit = 2.0 ** -PRECISION_BITS[fmt]
        assert float(errors.abs().max()) <= unit * 1.01
        assert 0.3 * unit < float(errors.square().mean().sqrt()) < 0.6 * unit

    def test_a_site_is_one_function_in_any_order(self, fmt):
        x, y = (spread(torch.randn(50, dtype=torch.float64)) for _ in range(2))
        first, second = RandomGrids(16, 7), RandomGrids(16, 7)
        a, b = first.round("a", x, fmt), first.round("b", y, fmt)
        assert torch.equal(second.round("b", y, fmt), b) and torch.equal(second.round("a", x, fmt), a)
        assert torch.equal(first.round("a", x, fmt), a)
        assert not torch.equal(first.round("b", x, fmt), a)
        assert not torch.equal(RandomGrids(16, 8).round("a", x, fmt), a)

    def test_zero_stays_zero(self, fmt):
        assert bool((RandomGrids(16, 9).round("a", torch.zeros(16, 30, dtype=torch.float64), fmt) == 0).all())

    def test_equal_values_get_equal_errors_unless_the_site_dithers(self, fmt):
        x = spread(torch.full((40,), 1.2345678901234, dtype=torch.float64))
        coherent = [
            torch.unique(RandomGrids(16, seed).round("a", x, fmt)[m]).numel() == 1
            for seed in range(8)
            for m in ODD_REPLICAS
        ]
        assert 0.25 < sum(coherent) / len(coherent) < 0.75


@pytest.mark.parametrize("fmt", ["fp32", "tf32", "tf32_rn", "fp16", "bf16"])
class TestSomeReplicas:
    X = torch.randn(16, 3, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def test_are_the_same_functions_whichever_are_asked_first(self, fmt):
        whole = RandomGrids(16, 7).round("a", self.X, fmt)
        grids = RandomGrids(16, 7)
        for first, last in SPANS:
            part = grids.some(first, last).round("a", self.X[first:last], fmt)
            assert float((part / whole[first:last] - 1).abs().max()) < 2.0**-50

    def test_in_place_is_the_same_number(self, fmt):
        for first, last in SPANS:
            x, grids = self.X[first:last].clone(), RandomGrids(16, 7).some(first, last)
            assert grids.round_("a", x, fmt) is x
            assert torch.equal(x, grids.round("a", self.X[first:last], fmt))

    def test_sums_and_constants_are_theirs(self, fmt):
        whole, some = RandomGrids(16, 7), RandomGrids(16, 7).some(5, 9)
        bits = PRECISION_BITS[fmt]
        assert torch.equal(
            some.accumulate("a", self.X[5:9], self.X[5:9].abs(), bits),
            whole.accumulate("a", self.X, self.X.abs(), bits)[5:9],
        )
        assert torch.equal(some.constant("a", 1e-3, self.X), whole.constant("a", 1e-3, self.X)[5:9])


def test_replicas_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"replicas are 3\.\.9, must be some of 0\.\.8"):
        RandomGrids(8).some(3, 9)


def test_offsets_of_large_tensors_repeat_at_no_stride():
    x = torch.full((2, 4, 2**15), 1.2345678901234, dtype=torch.float64)
    seeds = [s for s in range(20) if RandomGrids(2, s).round("a", x, "bf16")[1].unique().numel() > 1]
    rounded = RandomGrids(2, seeds[0]).round("a", x, "bf16")[1]
    assert seeds and all(not torch.equal(rounded[0], rounded[i]) for i in range(1, 4))


LARGE = torch.randn(5, 3, 50, 700, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
LAYOUTS = {"plain": LARGE, "turned": LARGE.mT, "spread": LARGE[:, :, :1].expand_as(LARGE)}


@pytest.fixture
def untiled(monkeypatch):
    return lambda: monkeypatch.setattr(rounding, "TILE", 2**40)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", ["fp32", "tf32", "tf32_rn", "fp16", "bf16"])
class TestTiles:
    """Larger than two tiles, and than a run of offsets, which no size here divides."""

    def test_are_the_numbers_of_the_whole(self, fmt, layout, untiled):
        x = LAYOUTS[layout]
        assert x.numel() >= 2 * rounding.TILE and x[0].numel() > rounding.OFFSETS
        tiled = [RandomGrids(8, 7).some(*span).round("a", x, fmt) for span in ((0, 5), (3, 8))]
        untiled()
        for one, span in zip(tiled, ((0, 5), (3, 8))):
            whole = RandomGrids(8, 7).some(*span).round("a", x, fmt)
            assert torch.equal(one, whole) and one.stride() == whole.stride()

    def test_add_up_to_the_numbers_of_the_whole(self, fmt, layout, untiled):
        x, bits = LAYOUTS[layout].clone(), PRECISION_BITS[fmt]
        tiled = [RandomGrids(5, 7).accumulate("a", y, x.abs(), bits) for y in (x, x.clone().requires_grad_())]
        untiled()
        whole = RandomGrids(5, 7).accumulate("a", x, x.abs(), bits)
        assert all(torch.equal(one, whole) for one in tiled) and tiled[1].requires_grad


def test_sites_draw_one_stream_whatever_is_asked_first():
    small, large = torch.randn(4, 30, dtype=torch.float64), torch.randn(4, 500, dtype=torch.float64)
    for seed in range(8):
        first, second = RandomGrids(4, seed), RandomGrids(4, seed)
        a, b = first.round("a", small, "bf16"), first.round("a", large, "bf16")
        assert torch.equal(second.round("a", large, "bf16"), b) and torch.equal(second.round("a", small, "bf16"), a)


def test_fp64_is_the_identity():
    x = torch.randn(8, 3, dtype=torch.float64)
    assert RandomGrids(8).round("a", x, "fp64") is x


def test_fp16_replicas_have_subnormals_and_report_overflow():
    grids, step = RandomGrids(16, 1), 2.0**-24
    x = spread(torch.rand(300, dtype=torch.float64) * 2.0**-15)
    errors = (grids.round("a", x, "fp16") - x).abs()
    assert 0.3 * step < float(errors.max()) <= 0.51 * step
    assert not grids.overflowed
    grids.round("a", spread(torch.tensor([66000.0], dtype=torch.float64)), "fp16")
    assert grids.overflowed


class TestAccumulate:
    def test_error_is_a_pitch_of_the_magnitude(self):
        value = torch.rand(16, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for magnitude in (1.0, 1.9, 100.0):
            size = torch.full_like(value, magnitude)
            errors = (RandomGrids(16, 2).accumulate("a", value, size, 20) - value).abs() / (magnitude * 2.0**-20)
            assert float(errors.max()) <= 0.72 and float(errors.square().mean().sqrt()) > 0.15

    def test_sums_proportional_to_their_magnitude_do_not_share_one_relative_error(self):
        """Else the differences of a cumulative sum of one sign would be exact, which no kernel's are."""
        value = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(0)
        relative = RandomGrids(16, 2).accumulate("a", spread(value), spread(value * 4.6)) / value - 1
        assert float(relative.std(1).min()) > 0.3 * float(relative.square().mean(1).sqrt().max())

    @pytest.mark.parametrize("magnitude", [0.0, 1e-320, 1e300], ids=["zero", "subnormal", "huge"])
    def test_no_magnitude_makes_a_nan_and_zero_stays_zero(self, magnitude):
        zero = torch.zeros(16, 4, dtype=torch.float64)
        out = RandomGrids(16, 2).accumulate("a", zero, torch.full_like(zero, magnitude))
        assert bool(torch.isfinite(out).all()) and (magnitude > 0 or bool((out == 0).all()))


def test_constants_are_one_per_replica_within_eps():
    grids = RandomGrids(16, 3)
    factor = grids.constant("a", 1e-3, torch.zeros(16, 2, 2, dtype=torch.float64))
    assert factor.shape == (16, 1, 1) and factor.unique().numel() == 16
    assert float((factor - 1).abs().max()) <= 1e-3
    assert torch.equal(factor, grids.constant("a", 1e-3, torch.zeros(16, 2, 2, dtype=torch.float64)))
