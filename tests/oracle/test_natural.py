"""Natural sizes: what a result is made of, where most of it cancels, and what they may not excuse."""

import pytest
import torch

from oracle.natural import natural_core
from oracle.operator import Options, evaluate

QUANTITIES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0")


def inputs(length: int, K: int, V: int, beta: float, decay: float = 0.0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(1, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    x = {"q": unit(draw(length, 1, K)), "k": unit(draw(length, 1, K)), "v": draw(length, 1, V)}
    x |= {"g": torch.full((1, length, 1, K), -decay), "beta": torch.full((1, length, 1), beta)}
    return x | {"initial_state": draw(1, K, V), "do": draw(length, 1, V), "dht": draw(1, K, V)}


def sizes(x: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest result over its natural size, by quantity."""
    exact, natural = evaluate(x, Options()), evaluate(x, Options(), core=natural_core)
    rms = lambda t: float(t.square().mean().sqrt())  # noqa: E731
    return {name: rms(exact[name]) / rms(natural[name]) for name in QUANTITIES if rms(natural[name])}


@pytest.mark.parametrize("decay", [0.0, 0.05, 5.0])
@pytest.mark.parametrize("K", [8, 32])
def test_results_are_about_as_large_as_their_terms(K, decay):
    """Random unit keys: nothing cancels, and no size is far from the result's."""
    for name, ratio in sizes(inputs(24, K, 8, 0.5, decay)).items():
        assert 0.03 < ratio < 3, (name, ratio)


def test_an_erased_state_is_small_beside_its_terms():
    """K = 1: every key is the same; 40 tokens of beta 0.5 leave 1e-12 of a state; its terms are as it was."""
    x = inputs(40, 1, 3, 0.5)
    x["do"] = torch.zeros_like(x["do"])
    found = sizes(x)
    assert found["dh0"] == pytest.approx(0.5**40, rel=1e-6)
    assert found["ht"] > 0.3, "what was written last is not erased"


def test_sizes_do_not_grow_with_repetition():
    """An unstable inverse loses a share of the result itself; sizes that grew with T would excuse it."""
    short, long = (evaluate(inputs(n, 1, 3, 2.0), Options(), core=natural_core) for n in (8, 512))
    for name in ("o", "dv"):
        assert float(long[name].max()) < 4 * float(short[name].max())


def test_a_decay_carries_less():
    natural = evaluate(inputs(3, 4, 2, 0.0, decay=1.0), Options(), core=natural_core)
    start = float(inputs(3, 4, 2, 0.0)["initial_state"].square().mean().sqrt())
    assert float(natural["ht"].max()) == pytest.approx(start * torch.e**-3)
