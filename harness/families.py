"""Authority on families: kinds of problems, each there because some fault shows in no other."""

from dataclasses import dataclass, field, replace

from harness.problem import Edit, Problem

BOUNDARIES = (0, 1, 15, 16, 17, 63, 64, 65)


@dataclass(frozen=True)
class Family:
    """A kind of problem. `sees`: what only it can see. `examples` always run; generated ones draw from `patterns`."""

    name: str
    sees: str
    examples: tuple[Problem, ...]
    patterns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: dict[str, object] = field(default_factory=dict)
    entries: tuple[str, ...] = ("recurrent", "chunk")
    gpu_only: bool = False
    weight: int = 1  # generated problems, as a multiple of the profile's


# Patterns of an ordinary call: everything large, nothing at a bound.
ORDINARY: dict[str, str] = {
    **{"q": "unit", "k": "unit", "v": "gauss", "g": "mild", "beta": "uniform"},
    **{"h0": "gauss", "do": "gauss", "dht": "gauss"},
}
_BASE = Problem(lengths=(20,), K=8, V=8, initial_state=True, **ORDINARY)
_LOGITS = {"beta_sigmoid": True, "beta": "gauss"}
_SOFTPLUS = {"gate": "softplus", "A_log": "gauss", "dt_bias": "gauss", "g": "gauss"}
_BOUND = {"gate": "lower_bound", "lower_bound": -5.0}
_BOUNDED = {**_BOUND, "safe_gate": True, "A_log": "gauss", "dt_bias": "gauss", "g": "gauss"}
_SLOW_BOUNDED = {"gate": "lower_bound", "lower_bound": -0.25, "A_log": "zeros", "dt_bias": "zeros", "g": "gauss"}
_NORMALISED = {"l2norm": True, "q": "gauss", "k": "gauss"}
_HALVING = {"q": "dyadic", "k": "onehot", "v": "dyadic", "g": "dyadic", "beta": "dyadic", "scale": 0.125}
_EXACT = {"h0": "dyadic", "do": "dyadic", "dht": "dyadic"}
_CANCELLING = {
    **{"lengths": (16, 15, 17), "packed": True, "tail": 18, "heads": 2, "group": 2, "K": 1, "V": 3, "dtype": "fp16"},
    **{"gate": "lower_bound", "lower_bound": -0.25, "gate_dtype": "fp16", "dt_bias": "zeros", "beta_sigmoid": True},
    **{"v_first": True, "seed": 2019},
}
_STARTS = {"entry": "chunk", "intermediates": True, "chunk_size": 32}
_ERASED = {"dtype": "fp16", "K": 1, "V": 3, "q": "gauss", "beta_sigmoid": True, "beta": "gauss", **_SLOW_BOUNDED}
_REPORTED = replace(_BASE, lengths=(70,), K=16, V=16, dtype="bf16", g="zeros", beta="ones", l2norm=True, q="gauss")
_MODEL = {"K": 128, "V": 128, "dtype": "bf16", "gate_dtype": "bf16", **_NORMALISED, **_LOGITS}
_FADING = {"g": "bounded", "loss": "state", "K": 64, "V": 64, "dtype": "bf16", **_NORMALISED, **_LOGITS}
_GATE = Problem(entry="gate", lengths=(40,), heads=2, K=4, g="gauss", gate="softplus", A_log="zeros", do="gauss")


def _but(**changes: object) -> Problem:
    return replace(_BASE, **changes)


def _gate(**changes: object) -> Problem:
    return replace(_GATE, **changes)


def _menu(**menus: str) -> dict[str, tuple[str, ...]]:
    return {name: tuple(menu.split()) for name, menu in menus.items()}


_FREE = {
    **_menu(q="unit gauss", v="gauss ramp", g="mild bounded time_constants", beta="uniform"),
    **_menu(h0="gauss", do="gauss", dht="gauss"),
}

FAMILIES: tuple[Family, ...] = (
    Family(
        "dyadic",
        "faults far below the rounding of bf16: nearly exact intermediates, and neighbours that differ in every input",
        (
            _but(**_HALVING, **_EXACT),
            _but(**_HALVING, **_EXACT, dtype="bf16", lengths=(18,), group=2),
            _but(**{**_HALVING, "g": "zeros", "beta": "ones"}, **_EXACT, dtype="bf16", lengths=(35,), heads=2),
        ),
        {
            **_menu(q="dyadic", k="onehot", v="dyadic ramp", g="dyadic zeros", beta="dyadic ones"),
            **_menu(h0="dyadic", do="dyadic", dht="dyadic"),
        },
    ),
    Family(
        "impulse",
        "one path from a source token to an output: a lost or doubled token, a shifted gate",
        (_but(v="onehot", k="unit", q="unit", g="mild", V=16, K=4, initial_state=False, lengths=(33,)),),
        _menu(q="unit", k="unit", v="onehot", g="mild slow", beta="uniform ones", h0="zeros", do="onehot", dht="zeros"),
    ),
    Family(
        "generic",
        "everything large: a wrong formula, scale, head, stride, base of the exponential",
        (
            _but(),
            _but(dtype="bf16", gate_dtype="bf16", K=16, V=12, heads=2, group=2),
            _but(dtype="fp16", K=12, V=20, v_first=True, **_NORMALISED, **_LOGITS),
            _but(lengths=(9, 9, 9), heads=3, group=2, K=5, V=3, scale=0.3),
            _but(**_SOFTPLUS, **_LOGITS, neg_eigval=True, l2norm=True, q="gauss", k="gauss"),
            _but(**_BOUNDED, **_LOGITS, l2norm=True, q="gauss", k="gauss", group=3),
            _but(loss="state"),
            _but(loss="o", final_state=False),
        ),
        {**_FREE, "k": ("unit",)},
    ),
    Family(
        "ragged",
        "boundaries: leaking neighbours, lost last tokens, empty sequences, unused tails, stale memory",
        (
            _but(lengths=BOUNDARIES[:5], packed=True, K=4, V=4),
            _but(lengths=(0, 0, 5), packed=True, offsets="int32"),
            _but(lengths=(20,), packed=True, tail=12),
            _but(lengths=(100,), packed=True, tail=28, K=4, V=4),
            _but(lengths=(63, 64, 65), packed=True, K=4, V=4, heads=1),
            _but(lengths=(5, 0, 16, 1), packed=True, tail=3, v_first=True, **_NORMALISED, **_SOFTPLUS, **_LOGITS),
            _but(lengths=(1,) * 24, packed=True, K=2, V=2),
            _but(lengths=(17, 0), packed=True, group=2, dtype="bf16", **_BOUNDED),
            _but(lengths=(0,), packed=True, tail=4),
        ),
        {**_FREE, "k": ("unit",)},
        {"packed": True},
    ),
    Family(
        "intermediates",
        "the state at the start of every chunk: layout, count, the chunk that a sequence ends in",
        (
            _but(**_STARTS, lengths=(70,), K=4, V=3),
            _but(**_STARTS, lengths=(33, 0, 32, 1), packed=True, tail=2, v_first=True, K=4, V=6, group=2),
            _but(**{**_STARTS, "chunk_size": 64}, lengths=(65, 65), K=3, V=4, **_BOUNDED),
        ),
        {**_FREE, "k": ("unit",)},
        {"entry": "chunk", "intermediates": True},
        entries=("chunk",),
    ),
    Family(
        "shapes",
        "masks past K and V, sizes that are no power of two, 1 and 256",
        (
            _but(K=1, V=1),
            # One channel: rows of dh0 that nearly cancel, by chance.
            _but(**{**_HALVING, "g": "gauss", "beta": "gauss", "scale": None}, **_EXACT, **_CANCELLING),
            _but(K=100, V=60, lengths=(7,), **_NORMALISED, **_SOFTPLUS),
            _but(K=3, V=37, lengths=(16,), heads=2, **_BOUNDED),
            _but(K=256, V=5, lengths=(4,)),
            # As one tile of 256 rows states read shared memory out of range on an H200, forward, and backward with dht.
            _but(K=256, V=64, lengths=(4,), dtype="bf16", loss="o", final_state=False),
            _but(K=256, V=16, lengths=(4,), dtype="bf16", loss="both"),
            _but(K=6, V=256, lengths=(4,), dtype="bf16"),
            _but(K=128, V=128, lengths=(5,), dtype="bf16", **_NORMALISED, **_BOUNDED, **_LOGITS),
        ),
        {**_FREE, "k": ("unit",)},
    ),
    Family(
        "gate_bound",
        "overflow of an anchored exponent: all gates at the bound, or half the channels",
        (
            _but(g="bound", lengths=(40,)),
            _but(g="half_bound", lengths=(40,), dtype="bf16"),
            _but(**{**_BOUNDED, "g": "raw_100", "A_log": "zeros"}, lengths=(33,)),
            _but(**{**_BOUNDED, "g": "raw_1e4", "A_log": None, "dt_bias": None}),
            # Gradients of 1e-35: NOTE [Underflow of anchored pairs] in oracle/envelope.py.
            _but(**_FADING, safe_gate=True, lengths=(40,), seed=1),
        ),
        {**_FREE, "k": ("unit",), "g": ("bound", "half_bound")},
        {"safe_gate": True},
    ),
    Family(
        "spikes_resets",
        "0 * inf, -inf - -inf, and small gates lost behind a huge one",
        (
            _but(g="spikes_50"),
            _but(g="spikes_500", dtype="bf16"),
            _but(g="spikes_1e6", lengths=(24,)),
            _but(g="resets", lengths=(24,)),
            _but(g="resets", lengths=(6, 8, 15), packed=True, dtype="bf16", group=2),
            _but(g="spikes_1e6", gate_dtype="bf16", **_NORMALISED),
        ),
        {**_FREE, "k": ("unit",), "g": ("spikes_50", "spikes_500", "spikes_1e6", "resets")},
    ),
    Family(
        "gate_extremes",
        "overflow and lost digits inside the activations: extreme A_log, raw gates of +-30 to +-1e4",
        (
            _but(**{**_SOFTPLUS, "g": "raw_30"}),
            _but(**{**_SOFTPLUS, "g": "raw_1e4", "A_log": "zeros"}),
            _but(**{**_SOFTPLUS, "g": "raw_100", "A_log": "extreme_80", "dt_bias": None}),
            _but(**{**_BOUNDED, "g": "raw_100", "A_log": "extreme_80"}),
            _but(**{**_BOUNDED, "g": "gauss", "A_log": "extreme_minus_80"}),
            _but(**{**_SOFTPLUS, "g": "raw_1e4", "A_log": "extreme_80"}),
        ),
        {
            **_FREE,
            "k": ("unit",),
            "g": ("raw_30", "raw_100", "raw_1e4"),
            "A_log": ("zeros", "kimi", "extreme_80", "extreme_minus_80"),
            "dt_bias": ("gauss", "kimi"),
        },
        {"gate": "softplus"},
    ),
    Family(
        "saturated_beta",
        "beta modes: sigmoid at both ends, doubled, zero",
        (
            _but(beta_sigmoid=True, beta="saturated"),
            _but(beta_sigmoid=True, beta="saturated", k="onehot", loss="o", lengths=(6,)),
            _but(beta_sigmoid=True, neg_eigval=True, beta="raw_100", dtype="bf16"),
            _but(beta="zeros"),
            _but(beta="ones"),
        ),
        {**_FREE, "k": ("unit",), "beta": ("zeros", "gauss", "saturated", "raw_100")},
        {"beta_sigmoid": True},
    ),
    Family(
        "repeated_keys",
        "an unstable inverse of I + L: equal and nearly equal keys, beta 1 and 2, no or slow decay",
        (
            _but(k="repeated", beta="ones", g="zeros", lengths=(40,)),
            _but(k="repeated", beta="twos", g="zeros", lengths=(40,), initial_state=False),
            _but(k="near_repeated", beta="near_one", g="slow", dtype="bf16", lengths=(40,), K=16),
            _but(k="repeated", l2norm=True, beta="twos", g="slow", dtype="bf16", lengths=(64,), K=16, V=16),
            _but(k="repeated", l2norm=True, beta="twos", g="zeros", dtype="bf16", lengths=(130,)),
            # With A_kk and R in bf16 on the fused routes half of the state was wrong at its end.
            _but(k="repeated", l2norm=True, beta="twos", g="zeros", dtype="bf16", lengths=(200,), heads=1, K=64, V=64),
            _but(**_ERASED, lengths=(16, 15, 17), packed=True, loss="state", v_first=True),
            _but(**_ERASED, lengths=(64, 17, 65), packed=True, l2norm=True),
        ),
        {**_FREE, "k": ("repeated", "near_repeated"), "beta": ("ones", "twos", "near_one"), "g": ("zeros", "slow")},
    ),
    Family(
        "slow_decay",
        "errors that grow over thousands of tokens, and the carried state",
        (
            _but(g="slow", lengths=(1024,), K=4, V=4),
            _but(g="time_constants", lengths=(200,), K=8, V=4, dtype="bf16"),
            _but(entry="chunk", chunk_size=32, g="slow", lengths=(64 * 32 + 5,), K=4, V=4),
        ),
        {**_FREE, "k": ("unit",), "g": ("slow", "time_constants")},
    ),
    Family(
        "magnitudes",
        "huge and tiny values, zero keys, fp16 near its maximum",
        (
            _but(v="huge", h0="huge"),
            _but(v="huge", dtype="fp16", h0="gauss"),
            _but(v="tiny", h0="tiny", do="tiny", dht="tiny"),
            _but(k="some_zero", q="some_zero"),
            _but(q="tiny", k="tiny", l2norm=True),
            _but(k="zeros", q="ones", l2norm=True),
            _but(q="huge"),
            _but(**_NORMALISED, dtype="bf16", scale=0.0),
            _but(**_NORMALISED, dtype="bf16", scale=1e-25),
            _but(**_NORMALISED, dtype="bf16", scale=-3e4),
        ),
        {**_FREE, "k": ("unit", "some_zero", "zeros"), "v": ("huge", "tiny", "gauss_1e3")},
    ),
    Family(
        "reported",
        "what real kernels have failed on, each as small as it was found (see the tables of known failures of "
        "other kernels)",
        (
            replace(_REPORTED, k="unit", g="mild", beta="uniform"),
            replace(_REPORTED, k="repeated", beta="ones"),
            replace(_REPORTED, k="repeated", beta="twos"),
            replace(_REPORTED, k="unit", g="spikes_1e6", beta="uniform"),
            replace(_REPORTED, k="unit", g="resets", beta="uniform"),
            replace(_REPORTED, k="unit", g="mild", beta="uniform", v="huge", h0="huge", dtype="fp16"),
            replace(_REPORTED, k="unit", g="mild", beta="uniform", lengths=(30, 0, 40), packed=True),
            replace(_REPORTED, k="unit", g="bound", beta="uniform", safe_gate=True),
        ),
        {**_FREE, "k": ("unit", "repeated"), "g": ("mild", "spikes_1e6", "resets")},
    ),
    Family(
        "gate_entry",
        "the gate alone: both activations, their adjoints and parameter gradients",
        (
            _gate(lengths=(20,), K=8, A_log="gauss", dt_bias="gauss"),
            _gate(lengths=(20,), K=8, A_log="gauss", dt_bias="gauss", **_BOUND),
            _gate(lengths=(33, 33), heads=3, K=100, A_log="kimi", dt_bias="kimi", gate_dtype="bf16"),
            _gate(lengths=(5,), heads=1, K=256, A_log=None, gate_dtype="fp16", **_BOUND),
            _gate(lengths=(7,), heads=1, K=1, g="ramp", gate="lower_bound", lower_bound=-0.5, do="ones"),
            _gate(g="raw_30", A_log="kimi"),
            _gate(g="raw_100", A_log="extreme_80"),
            _gate(g="raw_1e4", A_log="extreme_80", dt_bias="gauss"),
            _gate(g="raw_30", A_log="kimi", **_BOUND),
            _gate(g="raw_100", A_log="extreme_80", dt_bias="gauss", **_BOUND),
            _gate(g="raw_1e4", A_log="extreme_minus_80", **_BOUND),
            # exp(A_log) times the gate is -102: the slope's factors are 1e-45 and 1e34.
            _gate(
                g="zeros", A_log="extreme_80", edits=tuple(Edit("g", (t, 0, 1), -1.85e-33) for t in range(9)), **_BOUND
            ),
            _gate(lengths=(1024,), heads=1, K=16, A_log="kimi", dt_bias="kimi"),
        ),
        {
            **_menu(g="gauss raw_30 raw_100 raw_1e4", A_log="zeros gauss kimi extreme_80 extreme_minus_80"),
            **_menu(dt_bias="zeros gauss kimi", do="gauss ones onehot"),
        },
        {"gate": "softplus"},
        entries=("gate",),
        weight=20,
    ),
    Family(
        "long_decay",
        "errors in what a state still carries after 8192 tokens, more than the interpreter has time for",
        (
            _but(entry="chunk", g="slow", lengths=(8192,), K=64, V=64, dtype="bf16"),
            _but(entry="chunk", g="time_constants", lengths=(8192,), heads=2, K=64, V=64),
        ),
        entries=("chunk",),
        gpu_only=True,
    ),
    Family(
        "models",
        "real shapes and initialisations: Kimi-Linear 32 x 128 softplus, K3 96 x 128 lower bound -5, ragged packed",
        (
            _but(lengths=(8192,), heads=32, **_MODEL, **{**_SOFTPLUS, "A_log": "kimi", "dt_bias": "kimi"}),
            _but(lengths=(8192,), heads=96, **_MODEL, **_BOUNDED),
            _but(lengths=(1300, 547, 2048, 963, 271, 3063), packed=True, heads=32, **_MODEL, **_BOUNDED),
        ),
        entries=("chunk",),
        gpu_only=True,
    ),
)


def family(name: str) -> Family:
    for member in FAMILIES:
        if member.name == name:
            return member
    raise ValueError(f"family is {name!r}; it must be one of {', '.join(member.name for member in FAMILIES)}")
