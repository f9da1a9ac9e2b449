"""Authority on generating problems with Hypothesis: structure first, named patterns, so that what fails shrinks to
something readable.
"""

from hypothesis import strategies as st

from harness import patterns
from harness.families import BOUNDARIES, Family
from harness.problem import Problem

DIMS = (1, 2, 4, 8, 3, 16, 12)  # compile keys: a short menu, simplest first
DTYPES = ("fp32", "bf16", "fp16")


def lengths(longest: int) -> st.SearchStrategy[int]:
    """Short ones, both sides of every block boundary, then any."""
    boundaries = [length for length in BOUNDARIES if length <= longest]
    return st.one_of(st.integers(0, 3), st.sampled_from(boundaries), st.integers(0, longest))


@st.composite
def problems(draw, family: Family, entry: str, longest: int = 66) -> Problem:
    """A problem of `family` for an entry point; at most about `longest` tokens a sequence."""
    fixed = dict(family.fixed)
    pick = lambda name, menu: fixed[name] if name in fixed else draw(st.sampled_from(menu), label=name)  # noqa: E731
    flag = lambda name: fixed[name] if name in fixed else draw(st.booleans(), label=name)  # noqa: E731
    gate_entry = entry == "gate"
    packed = flag("packed") and not gate_entry
    if packed:
        sizes = tuple(draw(st.lists(lengths(longest), min_size=1, max_size=4), label="lengths"))
        tail = draw(st.integers(0, 20), label="tail")
    else:
        sizes = (draw(lengths(longest), label="length"),) * draw(st.integers(1, 2), label="batch")
        tail = 0
    structure = {
        "entry": entry,
        "lengths": sizes,
        "packed": packed,
        "tail": tail,
        "heads": draw(st.integers(1, 2), label="heads"),
        "group": 1 if gate_entry else draw(st.integers(1, 2), label="group"),
        "K": draw(st.sampled_from(DIMS), label="K"),
        "V": 1 if gate_entry else draw(st.sampled_from(DIMS), label="V"),
        "dtype": draw(st.sampled_from(DTYPES), label="dtype"),
        "gate_dtype": draw(st.sampled_from(DTYPES), label="gate_dtype"),
    }
    gate = pick("gate", ("softplus", "lower_bound") if gate_entry else ("pregated", "softplus", "lower_bound"))
    if gate_entry:
        gate = draw(st.sampled_from(("softplus", "lower_bound")), label="gate")
    safe = entry == "chunk" and flag("safe_gate") and gate != "softplus"
    structure |= {
        "gate": gate,
        "lower_bound": draw(st.sampled_from((-5.0, -1.0, -0.25)), label="lower_bound")
        if gate == "lower_bound"
        else None,
        "safe_gate": safe,
    }
    if not gate_entry:
        beta_sigmoid = flag("beta_sigmoid")
        # Drawn for every dtype: one that took fewer draws than fp32 would count as simpler.
        precision = draw(st.sampled_from(("ieee", "tf32")), label="precision") if entry == "chunk" else "ieee"
        structure |= {
            "l2norm": flag("l2norm"),
            "beta_sigmoid": beta_sigmoid,
            "neg_eigval": beta_sigmoid and flag("neg_eigval"),
            "initial_state": flag("initial_state"),
            "v_first": flag("v_first"),
            "intermediates": entry == "chunk" and flag("intermediates"),
            "chunk_size": draw(st.sampled_from((64, 32)), label="chunk_size") if entry == "chunk" else 64,
            "precision": precision if structure["dtype"] == "fp32" else "ieee",
            "loss": draw(st.sampled_from(("both", "o", "state")), label="loss") if not gate_entry else "both",
        }
    return Problem(**structure, **_patterns(draw, family, structure), seed=draw(st.integers(0, 2**16), label="seed"))


def _patterns(draw, family: Family, structure: dict) -> dict[str, str | None]:
    """A pattern for every tensor: the family's menu where it applies, readable ordinary values elsewhere."""
    has_gate = structure["gate"] != "pregated"
    probe = Problem(**structure, g="zeros", beta="zeros", A_log="zeros" if has_gate else None)
    menus, chosen = probe.menus(), {}
    ordinary = {
        "q": ("unit",),
        "k": ("unit",),
        "v": ("ramp", "gauss"),
        "g": ("gauss",) if has_gate else ("mild",),
        "beta": ("gauss",) if probe.beta_sigmoid else ("uniform",),
        "h0": ("gauss",),
        "do": ("gauss",),
        "dht": ("gauss",),
        "A_log": ("zeros", "gauss"),
        "dt_bias": ("zeros", "gauss"),
    }
    for name, fallback in ordinary.items():
        menu = [p for p in family.patterns.get(name, ()) if p in menus[name]] or list(fallback)
        if name == "g" and probe.safe_gate:
            menu = [p for p in menu if p not in patterns.BELOW_BOUND] or ["bound"]
        chosen[name] = draw(st.sampled_from(menu), label=name)
    if not has_gate or (probe.gate != "softplus" and draw(st.booleans(), label="without A_log")):
        chosen["A_log"] = None
    if not has_gate or draw(st.booleans(), label="without dt_bias"):
        chosen["dt_bias"] = None
    return chosen
