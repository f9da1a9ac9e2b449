"""Value patterns: finite where they must be, contractive keys, legal gates, and the same on every machine."""

import numpy as np
import pytest

from harness import patterns

SHAPE = (21, 2, 8)
CONTRACTIVE = ("onehot", "alternating", "unit", "repeated", "near_repeated", "some_zero", "tiny", "zeros")


def make(menu, name, shape=SHAPE, seed=0):
    return menu[name](np.random.default_rng([seed, 0]), shape)


@pytest.mark.parametrize("name", patterns.VALUES)
@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1), (3, 2, 4, 5)], ids=["tokens", "one", "state"])
def test_values_are_finite_float32_and_repeat(name, shape):
    first, again = make(patterns.VALUES, name, shape), make(patterns.VALUES, name, shape)
    assert first.dtype == np.float32 and first.shape == shape
    assert np.isfinite(first).all()
    assert np.array_equal(first, again)


@pytest.mark.parametrize("name", CONTRACTIVE)
def test_keys_stay_contractive_even_when_rounded_to_bf16(name):
    norms = np.sqrt((make(patterns.VALUES, name, (50, 3, 16)).astype(np.float64) ** 2).sum(-1))
    assert norms.max() <= (1.0 if name in ("onehot", "alternating", "zeros") else 1 - 2**-8)


@pytest.mark.parametrize("name", patterns.GATES)
def test_gates_are_never_positive_and_never_nan(name):
    g = make(patterns.GATES, name)
    assert (g <= 0).all()
    assert (g.min() < patterns.BOUND) == (name in patterns.BELOW_BOUND)
    assert np.isneginf(g).any() == (name == "resets")


def test_spikes_reach_all_channels_and_single_ones():
    spiked = make(patterns.GATES, "spikes_1e6")[:, 0] == -1e6
    assert spiked[3].all() and spiked[10].all()
    assert spiked[5].tolist() == [True] + [False] * 7


@pytest.mark.parametrize("name", patterns.BETAS)
def test_betas_are_between_0_and_2(name):
    beta = make(patterns.BETAS, name, (21, 2))
    assert beta.min() >= 0 and beta.max() <= 2


def test_the_sharpest_family_differs_between_neighbours():
    beta, q = make(patterns.BETAS, "dyadic", (6, 1)), make(patterns.VALUES, "dyadic", (6, 1, 8))
    assert (beta[1:] != beta[:-1]).all()
    assert (q[1:] != q[:-1]).any(-1).all()
    assert (q * 4 == np.round(q * 4)).all()


def test_kimi_linear_initialisation():
    A_log, bias = make(patterns.A_LOGS, "kimi", (500,)), make(patterns.DT_BIASES, "kimi", (50, 8)).astype(np.float64)
    assert 0 <= A_log.min() < 0.3 and 2.7 < A_log.max() <= np.log(16)
    step = np.log1p(np.exp(bias))
    assert step.min() * (1 + 1e-5) >= 1e-3 and step.max() <= 0.1 * (1 + 1e-5)


GOLDEN = {
    ("GATES", "mild"): [-0.37684327363967896, -0.04395667463541031],
    ("GATES", "bounded"): [-3.7677369117736816, -0.999335765838623],
    ("GATES", "time_constants"): [-0.17937126755714417, -0.32388973236083984],
    ("VALUES", "unit"): [0.621191143989563, -0.7709848880767822],
    ("DT_BIASES", "kimi"): [-2.9652493000030518, -3.965029001235962],
}


@pytest.mark.parametrize("menu, name", GOLDEN, ids=lambda value: value)
def test_seeded_patterns_keep_their_values(menu, name):
    """Literal values: stored problems name a pattern and a seed, and must mean the same tensors for ever."""
    assert make(getattr(patterns, menu), name, (1, 1, 2)).flatten().tolist() == GOLDEN[menu, name]
