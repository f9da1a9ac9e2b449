"""The mpmath oracle against central differences and answers by hand; the float64 oracle against the mpmath one."""

import ast
import inspect
import itertools
import math

import mpmath
import pytest
import torch
from mpmath import mpf

from oracle import arbitrary, arbitrary_operator, operator
from oracle.operator import Options

FLOAT64_ERROR = 1e-13  # of the largest element of a tensor; measured in the regimes here: at most 1.5e-14
INPUT_OF = {"dh0": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias"} | {
    f"d{name}": name for name in ("q", "k", "v", "g", "beta")
}


def problem(T=5, H=1, HV=2, K=3, V=2, B=1, cu_seqlens=None, seed=0, raw_gate=False, unit=True):
    """A generic call in float64; with `raw_gate` g is unbounded and A_log and dt_bias are there."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    x = {
        "q": randn(B, T, H, K),
        "k": randn(B, T, H, K),
        "v": randn(B, T, HV, V),
        "g": -randn(B, T, HV, K).abs(),
        "beta": torch.sigmoid(randn(B, T, HV)),
        "initial_state": randn(N, HV, K, V),
        "do": randn(B, T, HV, V),
        "dht": randn(N, HV, K, V),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens),
    }
    if unit:
        x |= {name: x[name] / x[name].norm(dim=-1, keepdim=True) for name in ("q", "k")}
    if raw_gate:
        x |= {"g": randn(B, T, HV, K), "A_log": 0.5 * randn(HV), "dt_bias": randn(HV * K)}
    return x


def repeated_keys(beta):
    x = problem(T=8)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    return x | {"g": torch.zeros_like(x["g"]), "beta": torch.full_like(x["beta"], beta)}


def gate_spikes(*values):
    x = problem(T=6)
    x["g"] = x["g"].clone()
    for t, value in enumerate(values, start=1):
        x["g"][:, t, :, t % 3] = value
    return x


def raw_gates(A_log, magnitude):
    x = problem(T=4, raw_gate=True)
    signs = torch.tensor([1.0, -1.0, 1e-3, -1e-3], dtype=torch.float64).view(1, 4, 1, 1)
    return x | {"g": magnitude * signs + x["g"], "A_log": torch.tensor([A_log, -1.0], dtype=torch.float64)}


def logits(x):
    return x | {"beta": 3 * torch.logit(x["beta"])}


def v_first(x):
    return x | {name: x[name].mT.contiguous() for name in ("initial_state", "dht")}


def zero_key(x):
    k = x["k"].clone()
    k[:, 1] = 0
    return x | {"k": k}


SOFTPLUS = Options(use_gate_in_kernel=True)
BOUNDED = Options(use_gate_in_kernel=True, lower_bound=-5.0)
REGIMES = {
    "dense": (problem(B=2), Options()),
    "varlen-chunks": (problem(T=9, cu_seqlens=[0, 0, 4, 4, 7]), Options(intermediates=True, chunk_size=2)),
    "dense-chunks-v_first": (v_first(problem(B=2)), Options(intermediates=True, chunk_size=2, state_v_first=True)),
    "gva-scale": (problem(H=2, HV=6), Options(scale=0.7)),
    "l2norm": (zero_key(problem(unit=False)), Options(use_qk_l2norm_in_kernel=True)),
    "beta_sigmoid": (logits(problem()), Options(use_beta_sigmoid_in_kernel=True)),
    "neg_eigval": (logits(problem()), Options(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
    "softplus": (problem(raw_gate=True), SOFTPLUS),
    "lower_bound": (problem(raw_gate=True), BOUNDED),
    "lower_bound-no_A_log": (problem(raw_gate=True) | {"A_log": None}, BOUNDED),
    "identical_keys_beta_2": (repeated_keys(2.0), Options()),
    "identical_keys_beta_1": (repeated_keys(1.0), Options()),
    "gates_-50_-500_-1e4": (gate_spikes(-50.0, -500.0, -1e4), Options()),
    "gates_-inf": (gate_spikes(-math.inf, -1.0, -math.inf), Options()),
    "softplus-raw_1e4": (raw_gates(0.0, 1e4), SOFTPLUS),
    "softplus-A_log_80": (raw_gates(80.0, 1e4), SOFTPLUS),
    "softplus-A_log_80-raw_-184": (raw_gates(80.0, 0.5) | {"dt_bias": torch.full((6,), -84.0)}, SOFTPLUS),
    "lower_bound-raw_1e4": (raw_gates(0.0, 1e4), BOUNDED),
    "lower_bound-A_log_80": (raw_gates(80.0, 1e4), BOUNDED),
    "no_gradients_in": (problem() | dict.fromkeys(("do", "dht", "initial_state")), Options()),
}
MOVABLE = [name for name in REGIMES if name != "no_gradients_in"]


def elements(shape):
    return itertools.product(*map(range, shape))


@pytest.mark.parametrize("regime", REGIMES)
def test_float64_oracle_is_right(regime):
    x, options = REGIMES[regime]
    exact, got = arbitrary.evaluate(x, options).to_float64(), operator.evaluate(x, options)
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        assert got[name].shape == value.shape, name
        error = float((got[name] - value).abs().max())
        assert error <= FLOAT64_ERROR * float(value.abs().max()), f"{name}: {error:.1e}"


@pytest.mark.parametrize("regime", MOVABLE)
def test_adjoint_is_the_central_difference(regime):
    """To 20 digits of the largest element, or of what a loss of order 1 resolves, at every element of every input."""
    x, options = REGIMES[regime]
    gradients = {name: value for name, value in arbitrary.evaluate(x, options).values.items() if name in INPUT_OF}
    assert set(map(INPUT_OF.get, gradients)) == {name for name in arbitrary.DIFFERENTIABLE if x.get(name) is not None}
    for name, gradient in gradients.items():
        limit = mpf(10) ** -20 * max(1e-10, *map(abs, gradient.flat))
        for index in elements(gradient.shape):
            difference = arbitrary.central_difference(x, options, INPUT_OF[name], index, **difference_at(regime))
            with mpmath.workdps(60):
                assert abs(difference - gradient[index]) <= limit, (name, index)


def difference_at(regime):
    """Where the operator curves over 1e-35, the step must be shorter than that."""
    return {"digits": 200, "step": "1e-75"} if "A_log_80" in regime else {"digits": 60, "step": "1e-25"}


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
@pytest.mark.parametrize("A_log, magnitude", [(0.0, 1.0), (0.0, 1e4), (80.0, 1e4), (80.0, 30.0), (-80.0, 1e4)])
def test_gate_alone(lower_bound, A_log, magnitude):
    x = {name: raw_gates(A_log, magnitude)[name] for name in ("g", "A_log", "dt_bias")}
    x["do"] = torch.linspace(-1, 1, x["g"].numel(), dtype=torch.float64).view_as(x["g"])
    options = Options(use_gate_in_kernel=True, lower_bound=lower_bound)
    exact = arbitrary.evaluate_gate(x, options)
    got = operator.evaluate_gate(x, options)
    assert got.keys() == exact.values.keys() == {"o", "dg", "dA_log", "ddt_bias"}
    for name, value in exact.to_float64().items():
        assert float((got[name] - value).abs().max()) <= FLOAT64_ERROR * float(value.abs().max()), name
    for name, index in (("dg", (0, 2, 0, 1)), ("dg", (0, 1, 1, 0)), ("dA_log", (0,)), ("ddt_bias", (4,))):
        gradient = exact.values[name]
        difference = arbitrary.central_difference(x, options, INPUT_OF[name], index, digits=200, step="1e-75")
        with mpmath.workdps(60):
            assert abs(difference - gradient[index]) <= mpf(10) ** -20 * max(map(abs, gradient.flat)), (name, index)


def test_one_token_by_hand():
    """S' = S/2, u = 2 (3 - 1/2 * 5) = 1, S = 1/2 + 5 = 11/2, o = 2 * 3 * 11/2, all exact."""
    one = lambda value: torch.full((1, 1, 1, 1), value, dtype=torch.float64)  # noqa: E731
    x = {"q": one(3.0), "k": one(5.0), "v": one(3.0), "g": one(-math.log(2.0)), "beta": one(2.0)[..., 0]}
    x["initial_state"] = one(1.0)
    exact = arbitrary.evaluate(x, Options(scale=2.0), gradients=False)
    with mpmath.workdps(60):
        decay = mpmath.exp(mpf(-math.log(2.0)))  # of the float64 nearest log 2
        state = decay + 5 * (2 * (3 - 5 * decay))
        assert abs(exact.values["ht"][0, 0, 0, 0] - state) < mpf(10) ** -50
        assert abs(exact.values["o"][0, 0, 0, 0] - 6 * state) < mpf(10) ** -50
    assert float(state) == pytest.approx(5.5, abs=1e-12)


def test_reset_forgets_the_state_and_gives_the_gate_no_gradient():
    x = problem(T=3)
    x["g"] = x["g"].clone()
    x["g"][:, 1] = -math.inf
    out = arbitrary.evaluate(x, Options()).values
    elsewhere = arbitrary.evaluate(x | {"initial_state": torch.zeros_like(x["initial_state"])}, Options()).values
    assert (out["ht"] == elsewhere["ht"]).all() and (out["o"][:, 1:] == elsewhere["o"][:, 1:]).all()
    assert not out["dg"][:, 1].any() and all(map(mpmath.isfinite, out["dg"].flat))


def test_infinite_raw_gate_is_a_reset_too():
    x = problem(T=3, raw_gate=True)
    x["g"] = x["g"].clone()
    x["g"][0, 1, 0, 0], x["g"][0, 2, 1, 1] = math.inf, -math.inf
    gradients = arbitrary.evaluate(x, SOFTPLUS).values
    assert gradients["dg"][0, 1, 0, 0] == gradients["dg"][0, 2, 1, 1] == 0
    assert all(mpmath.isfinite(value) for name in gradients for value in gradients[name].flat)


def test_unused_tail_and_empty_sequences():
    x = problem(T=9, cu_seqlens=[0, 0, 4, 4, 7])
    out = arbitrary.evaluate(x, Options(intermediates=True, chunk_size=3)).to_float64()
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not out[name][:, 7:].any() and out[name][:, :7].abs().sum() > 0, name
    for empty in (0, 2):
        assert torch.equal(out["ht"][empty], x["initial_state"][empty])
        assert torch.equal(out["dh0"][empty], x["dht"][empty])
    assert out["h"].shape == (1, 3, 2, 3, 2)
    assert torch.equal(out["h"][0, [0, 2]], x["initial_state"][[1, 3]])


def test_low_precision_inputs_are_taken_exactly():
    x = {name: value if value is None else value.to(torch.bfloat16) for name, value in problem().items()}
    wide = {name: value if value is None else value.double() for name, value in x.items()}
    narrow, exact = arbitrary.evaluate(x, Options()).values, arbitrary.evaluate(wide, Options()).values
    assert all((narrow[name] == exact[name]).all() for name in exact)


@pytest.mark.parametrize("digits", [1, 30, 100])
def test_more_digits_confirm_fewer(digits):
    x, options = REGIMES["softplus"]
    few, many = arbitrary.evaluate(x, options, digits=digits), arbitrary.evaluate(x, options, digits=digits + 40)
    assert few.digits == digits and few.precision >= 2 * digits
    with mpmath.workdps(2 * digits + 100):
        for name, value in many.values.items():
            error = max(abs(a - b) / (abs(b) + mpf(10) ** -digits) for a, b in zip(few.values[name].flat, value.flat))
            assert error <= mpf(10) ** -digits, name


def test_precision_is_doubled_until_nothing_is_lost():
    """10^300 + (v - 10^300): rounded to nearest, 40 and 80 digits would both say 0."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    x = {"q": one, "k": one, "v": 3 * one, "g": 0 * one, "beta": one[..., 0], "initial_state": 1e300 * one}
    exact = arbitrary.evaluate(x, Options(), digits=10)
    assert exact.values["ht"][0, 0, 0, 0] == 3 and exact.precision > 300
    assert arbitrary.evaluate(problem(), Options(), digits=10).precision == 80
    assert mpmath.mp._prec_rounding == [53, "n"]


def test_disagreement_is_an_error(monkeypatch):
    noise = itertools.count(1)
    monkeypatch.setattr(arbitrary_operator, "operator", lambda *_: {"o": arbitrary_operator.zeros(1) + next(noise)})
    with pytest.raises(ArithmeticError, match="decimal digits do not agree to 50"):
        arbitrary.evaluate(problem(), Options())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: arbitrary.evaluate(x, Options(), digits=0), "digits is 0, must be at least 1"),
        (lambda x: arbitrary.central_difference(x, Options(), "do", (0, 0, 0, 0)), "tensor_name is 'do', must be one"),
        (lambda x: arbitrary.central_difference(x, Options(), "A_log", (0,)), r"tensor_name is 'A_log', must be one"),
    ],
    ids=["digits", "not_an_input", "absent"],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem())


@pytest.mark.parametrize("module", [arbitrary, arbitrary_operator], ids=lambda module: module.__name__)
def test_shares_nothing_with_the_float64_oracle(module):
    tree = ast.parse(inspect.getsource(module))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in imported if name.split(".")[0] == "oracle"}
    assert ours <= {"oracle", "oracle.arbitrary_operator"}
