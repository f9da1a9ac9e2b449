"""The whole operator against autograd of a loop over tokens, for every combination of options, and its edges."""

import math
from itertools import product

import pytest
import torch

from oracle import EXACT, Options, RandomGrids, ToFormat, evaluate, evaluate_gate, operator
from oracle.packing import Layout

AGREEMENT = 1e-12  # of a tensor's largest element
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
GRADIENT = {name: f"d{name}" for name in LEAVES} | {"initial_state": "dh0"}
MODES = [
    words
    for words in product(
        ("dense", "varlen"),
        ("", "gva"),
        ("pregated", "softplus", "lower_bound"),
        ("", "l2norm"),
        ("", "beta_sigmoid", "neg_eigval"),
        ("", "v_first"),
    )
]
IDS = ["-".join(filter(None, words)) for words in MODES]


def problem(words, seed=0, K=3, V=2):
    """(inputs, options) of a call in these modes; packed: an empty sequence first, one inside, and an unused tail."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    varlen, H, HV = "varlen" in words, 2, 4 if "gva" in words else 2
    B, T, N = (1, 9, 4) if varlen else (2, 5, 2)
    state = (V, K) if "v_first" in words else (K, V)
    raw = "softplus" in words or "lower_bound" in words
    logits = "beta_sigmoid" in words or "neg_eigval" in words
    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, HV, V), "do": randn(B, T, HV, V)}
    x |= {"g": randn(B, T, HV, K), "beta": randn(B, T, HV)}
    x |= {"initial_state": randn(N, HV, *state), "dht": randn(N, HV, *state)}
    if raw:
        x |= {"A_log": randn(HV), "dt_bias": randn(HV * K)}
    else:
        x["g"] = -x["g"].abs()
    if not logits:
        x["beta"] = torch.sigmoid(x["beta"])
    if varlen:
        x["cu_seqlens"] = torch.tensor([0, 0, 4, 4, 7])
    options = Options(
        use_qk_l2norm_in_kernel="l2norm" in words,
        use_gate_in_kernel=raw,
        lower_bound=-5.0 if "lower_bound" in words else None,
        use_beta_sigmoid_in_kernel=logits,
        allow_neg_eigval="neg_eigval" in words,
        state_v_first="v_first" in words,
        chunk_size=2,
        intermediates=True,
    )
    return x, options


def naive(x, options):
    """o, ht, h and gradients by autograd of a loop over sequences, heads and tokens."""
    leaves = {name: x[name].detach().clone().requires_grad_() for name in LEAVES if x.get(name) is not None}
    y = {**x, **leaves}
    HV, H, K = x["v"].shape[2], x["q"].shape[2], x["q"].shape[3]
    if options.use_qk_l2norm_in_kernel:
        y |= {name: y[name] / (y[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k")}
    if options.use_gate_in_kernel:
        z, rate = y["g"], 1.0
        if y.get("dt_bias") is not None:
            z = z + y["dt_bias"].view(HV, K)
        if y.get("A_log") is not None:
            rate = y["A_log"].exp()[:, None]
        bound = options.lower_bound
        y["g"] = -rate * torch.log1p(z.exp()) if bound is None else bound * torch.sigmoid(rate * z)
    if options.use_beta_sigmoid_in_kernel:
        y["beta"] = (2 if options.allow_neg_eigval else 1) * torch.sigmoid(y["beta"])
    turned = lambda state: state.mT if options.state_v_first else state  # noqa: E731
    layout = Layout.of(*x["q"].shape[:2], x.get("cu_seqlens"))
    flat = {name: y[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    scale = K**-0.5 if options.scale is None else options.scale
    o, finals, chunks = [[torch.zeros_like(x["v"][0, 0, 0])] * HV for _ in range(layout.rows)], [], []
    for n, (start, length) in enumerate(zip(layout.starts, layout.lengths)):
        states = [torch.zeros_like(x["q"][0, 0, 0, :, None] * x["v"][0, 0, 0]) for _ in range(HV)]
        if y.get("initial_state") is not None:
            states = list(turned(y["initial_state"][n]))
        for t in range(length):
            row = start + t
            if t % options.chunk_size == 0:
                chunks.append(torch.stack(states))
            outputs = []
            for hv in range(HV):
                q, k = (flat[name][row, hv // (HV // H)] for name in ("q", "k"))
                decayed = flat["g"][row, hv].exp()[:, None] * states[hv]
                u = flat["beta"][row, hv] * (flat["v"][row, hv] - decayed.T @ k)
                states[hv] = decayed + torch.outer(k, u)
                outputs.append(scale * states[hv].T @ q)
            o[row] = outputs
        finals.append(torch.stack(states))
    out = {"o": torch.stack([torch.stack(row) for row in o]).view_as(x["v"]), "ht": turned(torch.stack(finals))}
    given = zip((out["o"], out["ht"]), (x.get("do"), x.get("dht")))
    loss = sum((value * incoming).sum() for value, incoming in given if incoming is not None)
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    if options.intermediates:
        out["h"] = turned(torch.stack(chunks)).unflatten(0, (1 if "cu_seqlens" in x else x["q"].shape[0], -1))
    return {name: value.detach() for name, value in out.items()} | dict(zip(map(GRADIENT.get, leaves), gradients))


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        assert float((got[name] - value).abs().max()) <= AGREEMENT * float(value.abs().max()), name


@pytest.mark.parametrize("words", MODES, ids=IDS)
def test_every_quantity_is_autograd_of_the_loop(words):
    x, options = problem(words)
    assert_close(evaluate(x, options), naive(x, options))


ABSENT = {
    "state": ("initial_state",),
    "do": ("do",),
    "dht": ("dht",),
    "A_log": ("A_log",),
    "dt_bias": ("dt_bias",),
    "A_log_and_dt_bias": ("A_log", "dt_bias"),
    "all_optional": ("initial_state", "dht", "A_log", "dt_bias"),
}


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_absent_tensors(layout, absent):
    x, options = problem((layout, "gva", "lower_bound"))
    x |= dict.fromkeys(ABSENT[absent])
    assert_close(evaluate(x, options), naive(x, options))


def test_scale_of_the_caller():
    x, options = problem(("dense", "gva", "pregated"))
    options = Options(scale=-0.3)
    assert_close(evaluate(x, options), naive(x, options))


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx, names, rest, options, *tensors):
        ctx.names, ctx.rest, ctx.options = names, rest, options
        ctx.save_for_backward(*tensors)
        out = evaluate(dict(zip(names, tensors)) | rest, options, gradients=False)
        return out["o"], out["ht"]

    @staticmethod
    def backward(ctx, do, dht):
        x = dict(zip(ctx.names, ctx.saved_tensors)) | ctx.rest | {"do": do, "dht": dht}
        out = evaluate(x, ctx.options)
        return None, None, None, *(out[GRADIENT[name]] for name in ctx.names)


@pytest.mark.parametrize(
    "words",
    [
        ("dense", "gva", "softplus", "l2norm", "beta_sigmoid"),
        ("varlen", "gva", "lower_bound", "l2norm", "neg_eigval", "v_first"),
    ],
    ids="-".join,
)
def test_gradcheck(words):
    x, options = problem(words, K=2, V=2)
    names = [name for name in LEAVES if name in x]
    rest = {name: x[name] for name in ("cu_seqlens",) if name in x}
    leaves = [x[name].clone().requires_grad_() for name in names]
    apply = lambda *tensors: _Operator.apply(names, rest, options, *tensors)  # noqa: E731
    assert torch.autograd.gradcheck(apply, leaves, eps=1e-6, atol=1e-7)


def test_unused_tail_is_exactly_zero_whatever_it_holds():
    x, options = problem(("varlen", "gva", "softplus", "l2norm", "beta_sigmoid"))
    clean = evaluate(x, options)
    poisoned = dict(x)
    for name in ("q", "k", "v", "g", "beta", "do"):
        poisoned[name] = x[name].clone()
        poisoned[name][:, 7:] = math.nan
    for rounding in (EXACT, RandomGrids(4)):
        out = evaluate(poisoned, options, rounding=rounding)
        for name, value in out.items():
            assert bool(torch.isfinite(value).all()), name
            if name in operator.BY_TOKEN:
                assert not bool(value.movedim(2 if rounding.replicas else 1, 0)[7:].any()), name
            if not rounding.replicas:
                assert torch.equal(value, clean[name]), name


@pytest.mark.parametrize("state", ["state", "no_state"])
def test_empty_sequences_hand_their_state_on(state):
    x, options = problem(("varlen", "gva", "pregated"))
    if state == "no_state":
        del x["initial_state"]
    out = evaluate(x, options)
    for empty in (0, 2):
        assert torch.equal(out["ht"][empty], x["initial_state"][empty] if state == "state" else out["ht"][empty] * 0)
        if state == "state":
            assert torch.equal(out["dh0"][empty], x["dht"][empty])
    assert ("dh0" in out) == (state == "state")


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0]], ids=["only_empty", "no_sequence"])
def test_nothing_but_a_tail(lengths):
    x, options = problem(("varlen", "pregated"))
    N = len(lengths) - 1
    x |= {"cu_seqlens": torch.tensor(lengths), "initial_state": x["initial_state"][:N], "dht": x["dht"][:N]}
    out = evaluate(x, options)
    assert out["h"].shape == (1, 0, 2, 3, 2) and torch.equal(out["ht"], x["initial_state"])
    assert not any(bool(out[name].any()) for name in operator.BY_TOKEN)


@pytest.mark.parametrize("gate", ["pregated", "softplus"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_a_reset_has_no_gradient(layout, gate):
    """-inf as the gate, or out of a raw gate of +inf: its dg is exactly 0, and everything else is finite."""
    x, options = problem((layout, "gva", gate))
    mask = torch.zeros_like(x["g"], dtype=torch.bool)
    mask[:, 1], mask[:, 3, 0, 1] = True, True
    x["g"] = x["g"].masked_fill(mask, -math.inf if gate == "pregated" else math.inf)
    out = evaluate(x, options)
    assert all(bool(torch.isfinite(value).all()) for value in out.values())
    assert not bool(out["dg"][mask].any()) and bool(out["dg"][:, 2].any())


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("words", [("dense", "gva"), ("varlen", "gva", "v_first")], ids="-".join)
def test_blocks_leave_no_trace(monkeypatch, words, budget):
    x, options = problem((*words, "lower_bound", "l2norm", "beta_sigmoid"))
    whole = evaluate(x, options)
    monkeypatch.setitem(operator.BLOCK_BYTES, "cpu", budget)
    for name, value in evaluate(x, options).items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantised_inputs_are_taken_exactly(dtype):
    x, options = problem(("varlen", "gva", "softplus", "l2norm", "beta_sigmoid"))
    narrow = {name: value if name == "cu_seqlens" else value.to(dtype) for name, value in x.items()}
    wide = {name: value if name == "cu_seqlens" else value.double() for name, value in narrow.items()}
    expected = evaluate(wide, options)
    for name, value in evaluate(narrow, options).items():
        assert value.dtype == torch.float64 and torch.equal(value, expected[name]), name


def test_inputs_stay_as_they_are():
    x, options = problem(("varlen", "gva", "softplus", "l2norm", "beta_sigmoid", "v_first"))
    before = {name: value.clone() for name, value in x.items()}
    evaluate(x, options)
    evaluate(x, options, rounding=RandomGrids(2))
    assert all(torch.equal(x[name], value) for name, value in before.items())


@pytest.mark.parametrize("words", MODES[::7], ids=IDS[::7])
def test_replicas_are_close_and_in_front(words):
    """[M, ...] for every quantity, off by fp32 roundoffs and no more, and the same again with the same seed."""
    x, options = problem(words)
    exact, got, again = evaluate(x, options), *(evaluate(x, options, rounding=RandomGrids(6, seed=1)) for _ in range(2))
    assert got.keys() == exact.keys()
    for name, value in exact.items():
        assert got[name].shape == (6, *value.shape) and torch.equal(got[name], again[name]), name
        assert 0 < float((got[name] - value).abs().max()) < 1e-4 * float(value.abs().max()), name


@pytest.mark.parametrize("stage", ["gate", "beta", "qk_norm", "decay", "state", "update", "state_grad", "partial_grad"])
def test_formats_reach_their_stage(stage):
    x, options = problem(("dense", "gva", "lower_bound", "l2norm", "beta_sigmoid"))
    plain, coarse = (
        evaluate(x, options, rounding=ToFormat(), formats=formats) for formats in (None, {stage: "bf16", "o": "bf16"})
    )
    moved = {name for name in plain if not torch.equal(plain[name], coarse[name])}
    assert moved and ("o" in moved) == (stage not in ("state_grad", "partial_grad")), moved


def test_q_and_k_are_both_kept_in_their_format():
    """The state depends on k alone; with beta 0 the output depends on q alone."""
    x, options = problem(("dense", "pregated", "l2norm", "beta_sigmoid"))
    for name, inputs in (("ht", x), ("o", x | {"beta": torch.full_like(x["beta"], -1e4)})):
        plain, coarse = (
            evaluate(inputs, options, gradients=False, rounding=ToFormat(), formats={"qk_norm": fmt})[name]
            for fmt in ("fp32", "bf16")
        )
        assert not torch.equal(plain, coarse), name


@pytest.mark.parametrize("kind", ["softplus", "lower_bound"])
def test_gate_alone_is_the_gate_of_the_operator(kind):
    x, options = problem(("dense", "gva", kind))
    o = evaluate_gate(x | {"do": None}, options)
    assert o.keys() == {"o"}
    pregated = evaluate({**x, "g": o["o"], "A_log": None, "dt_bias": None}, Options(chunk_size=2, intermediates=True))
    expected = evaluate(x, options)
    alone = evaluate_gate({"g": x["g"], "A_log": x["A_log"], "dt_bias": x["dt_bias"], "do": pregated["dg"]}, options)
    chained = {**pregated, **{name: alone[name] for name in ("dg", "dA_log", "ddt_bias")}}
    assert all(torch.equal(expected[name], chained[name]) for name in expected)
    rounded = evaluate_gate(x | {"do": pregated["dg"]}, options, rounding=RandomGrids(6))
    assert {name: value.shape[1:] for name, value in rounded.items()} == {name: alone[name].shape for name in alone}
    stored = evaluate_gate(x, options, gradients=False, rounding=ToFormat(), formats={"gate": "bf16"})["o"]
    assert torch.equal(stored, stored.bfloat16().double())


@pytest.mark.parametrize(
    "words, change, message",
    [
        (("dense", "softplus"), {"A_log": None}, r"A_log is None, must be \[HV\]"),
        (("dense",), {"v": torch.zeros(2, 5, 3, 2)}, "v has 3 heads, must be a multiple of the 2 heads of q"),
        (("dense",), {"cu_seqlens": torch.tensor([0, 5])}, "batch is 2, must be 1 with cu_seqlens"),
    ],
    ids=["A_log", "heads", "batch"],
)
def test_contradictions_are_named(words, change, message):
    x, options = problem((*words, "l2norm"))
    with pytest.raises(ValueError, match=message):
        evaluate(x | change, options)


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(allow_neg_eigval=True), "allow_neg_eigval is True"),
        (Options(intermediates=True, chunk_size=0), "chunk_size is 0, must be positive"),
    ],
    ids=["neg_eigval", "chunk_size"],
)
def test_contradictory_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(problem(("dense", "pregated"))[0], options)
