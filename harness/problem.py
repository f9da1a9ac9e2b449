"""Authority on problems: what a test input is, how it is written down, and how its tensors come out the same
everywhere.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness import patterns
from oracle.operator import Options

ENTRIES = ("recurrent", "chunk", "gate")
GATES = ("pregated", "softplus", "lower_bound")
LOSSES = ("both", "o", "state", "none")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFFSETS = {"int64": torch.int64, "int32": torch.int32}
STREAMS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "A_log",
    "dt_bias",
    "h0",
    "do",
    "dht",
)  # position = stream of the seed; only append
MAX_JSON_BYTES = 2**20
MAX_TOKENS, MAX_HEADS, MAX_DIM, MAX_EDITS = 2**21, 4096, 256, 64


@dataclass(frozen=True)
class Edit:
    """One element set by hand after everything else: `tensor` is a stream name, `index` counts in the tensor's own
    layout.
    """

    tensor: str
    index: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Problem:
    """An input of the operator in plain scalars and names, structure first; the defaults are the simplest problem
    there is.

    `lengths`: one per sequence; equal ones make a dense batch unless `packed`. `tail`: tokens after the last packed
    sequence. HV =
    heads * group. `loss`: which outputs gradients come from.
    """

    entry: str = "recurrent"
    lengths: tuple[int, ...] = (1,)
    packed: bool = False
    tail: int = 0
    heads: int = 1
    group: int = 1
    K: int = 1
    V: int = 1
    dtype: str = "fp32"
    gate_dtype: str = "fp32"
    gate: str = "pregated"
    lower_bound: float | None = None
    safe_gate: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    initial_state: bool = False
    final_state: bool = True
    v_first: bool = False
    intermediates: bool = False
    chunk_size: int = 64
    scale: float | None = None
    offsets: str = "int64"
    loss: str = "both"
    q: str = "ones"
    k: str = "unit"
    v: str = "ones"
    g: str = "zeros"
    beta: str = "ones"
    A_log: str | None = None
    dt_bias: str | None = None
    h0: str = "ones"
    do: str = "ones"
    dht: str = "ones"
    seed: int = 0
    edits: tuple[Edit, ...] = ()

    def __repr__(self) -> str:
        """Valid Python, the fields that differ from the default only."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Problem({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def __post_init__(self):
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "edits", tuple(self.edits))
        for name, wrong, must in self._faults():
            raise ValueError(f"Problem.{name} is {wrong!r}; it must be {must}")

    def _faults(self):
        integer = lambda x, low, high: type(x) is int and low <= x <= high  # noqa: E731
        if not all(integer(length, 0, MAX_TOKENS) for length in self.lengths) or sum(self.lengths) > MAX_TOKENS:
            yield "lengths", self.lengths, f"token counts of at most {MAX_TOKENS} together"
        if not self.packed and len(set(self.lengths)) > 1:
            yield "lengths", self.lengths, "all equal, unless packed is True"
        if not self.packed and not self.lengths:
            yield "lengths", self.lengths, "at least one, unless packed is True"
        if not integer(self.tail, 0, MAX_TOKENS) or (self.tail and not self.packed):
            yield "tail", self.tail, "a token count, and 0 unless packed is True"
        for name, high in (("heads", MAX_HEADS), ("group", MAX_HEADS), ("K", MAX_DIM), ("V", MAX_DIM)):
            if not integer(getattr(self, name), 1, high):
                yield name, getattr(self, name), f"an integer in 1..{high}"
        menus = {
            "entry": ENTRIES,
            "gate": GATES,
            "loss": LOSSES,
            "dtype": DTYPES,
            "gate_dtype": DTYPES,
            "offsets": OFFSETS,
        }
        menus |= {"chunk_size": (32, 64)} | {name: menu for name, menu in self.menus().items()}
        for name, menu in menus.items():
            value = getattr(self, name)
            if value not in menu and not (value is None and name in ("A_log", "dt_bias")):
                yield name, value, f"one of {', '.join(map(str, menu))}"
        for name in (
            "packed",
            "safe_gate",
            "l2norm",
            "beta_sigmoid",
            "neg_eigval",
            "initial_state",
            "final_state",
            "v_first",
            "intermediates",
        ):
            if type(getattr(self, name)) is not bool:
                yield name, getattr(self, name), "True or False"
        bound = self.lower_bound
        if (self.gate == "lower_bound") != (bound is not None) or (bound is not None and not -math.inf < bound < 0):
            yield "lower_bound", bound, "a finite number below 0 with gate='lower_bound', else None"
        if self.scale is not None and not math.isfinite(self.scale):
            yield "scale", self.scale, "finite, or None"
        if not integer(self.seed, 0, 2**32 - 1):
            yield "seed", self.seed, "an integer in 0..2^32 - 1"
        if len(self.edits) > MAX_EDITS or any(not isinstance(e, Edit) or e.tensor not in STREAMS for e in self.edits):
            yield "edits", self.edits, f"at most {MAX_EDITS} edits of {', '.join(STREAMS)}"

    def menus(self) -> dict[str, Mapping[str, patterns.Pattern]]:
        """The patterns that each tensor of this problem may have."""
        gates = patterns.GATES if self.gate == "pregated" and self.entry != "gate" else patterns.RAW_GATES
        return {
            **{name: patterns.VALUES for name in ("q", "k", "v", "h0", "do", "dht")},
            "g": gates,
            "beta": patterns.BETA_LOGITS if self.beta_sigmoid else patterns.BETAS,
            "A_log": patterns.A_LOGS,
            "dt_bias": patterns.DT_BIASES,
        }

    @property
    def batch(self) -> tuple[int, int]:
        """(B, T) of the tensors."""
        if self.packed:
            return 1, sum(self.lengths) + self.tail
        return len(self.lengths), self.lengths[0]

    @property
    def value_heads(self) -> int:
        return self.heads * self.group

    @property
    def gradients(self) -> bool:
        return self.loss != "none"

    def quantities(self) -> frozenset[str]:
        """What a call of this problem returns."""
        if self.entry == "gate":
            names = {"o", "dg"} if self.gradients else {"o"}
            parameters = {"dA_log": self.A_log, "ddt_bias": self.dt_bias}
            return frozenset(names | ({n for n, pattern in parameters.items() if pattern} if self.gradients else set()))
        names = {"o"} | ({"ht"} if self.final_state else set()) | ({"h"} if self.intermediates else set())
        if self.gradients:
            names |= {"dq", "dk", "dv", "dg", "dbeta"} | ({"dh0"} if self.initial_state else set())
            if self.gate != "pregated":
                names |= ({"dA_log"} if self.A_log else set()) | ({"ddt_bias"} if self.dt_bias else set())
        return frozenset(names)

    def to_json(self, found: Mapping[str, object] | None = None) -> str:
        return json.dumps({"schema": 1, "problem": asdict(self), "found": dict(found or {})}, indent=1, allow_nan=True)

    @classmethod
    def from_json(cls, text: str) -> "Problem":
        """The problem of a JSON document; anything that is not exactly one is a ValueError that says what is wrong."""
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"problem JSON has {len(text)} characters; it must have at most {MAX_JSON_BYTES}")
        try:
            document = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"problem JSON cannot be read: {error}") from None
        if (
            not isinstance(document, dict)
            or document.get("schema") != 1
            or not isinstance(document.get("problem"), dict)
        ):
            raise ValueError('problem JSON must be {"schema": 1, "problem": {...}, "found": {...}}')
        given = dict(document["problem"])
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"problem JSON has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
        try:
            given["lengths"] = tuple(given.get("lengths", (1,)))
            given["edits"] = tuple(
                Edit(str(e["tensor"]), tuple(int(i) for i in e["index"]), float(e["value"]))
                for e in given.get("edits", ())
            )
            return cls(**given)
        except (TypeError, KeyError) as error:
            raise ValueError(f"problem JSON has a field of the wrong kind: {error}") from None

    @classmethod
    def load(cls, path: Path | str) -> "Problem":
        path = Path(path)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path} has {size} bytes; a problem has at most {MAX_JSON_BYTES}")
        try:
            return cls.from_json(path.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Case:
    """A problem's tensors: `inputs` for the oracle and the kernels alike, `options` for the oracle."""

    problem: Problem
    inputs: dict[str, Tensor | None]
    options: Options


def materialise(problem: Problem, device: torch.device | str = "cpu") -> Case:
    """The tensors of a problem, each from its own stream of the seed, rounded to its dtype: the same on every
    machine.
    """
    B, T = problem.batch
    HV, K, V = problem.value_heads, problem.K, problem.V
    io, gate_dtype = DTYPES[problem.dtype], DTYPES[problem.gate_dtype]
    rows = B * T
    sequences = len(problem.lengths)
    in_kernel = problem.gate != "pregated" or problem.entry == "gate"
    made = {"g": _values(problem, "g", (rows, HV, K)).reshape(B, T, HV, K)}
    dtypes = {"g": gate_dtype}
    if problem.entry != "gate":
        made["q"] = _values(problem, "q", (rows, problem.heads, K)).reshape(B, T, problem.heads, K)
        made["k"] = _values(problem, "k", (rows, problem.heads, K)).reshape(B, T, problem.heads, K)
        made["v"] = _values(problem, "v", (rows, HV, V)).reshape(B, T, HV, V)
        made["beta"] = _values(problem, "beta", (rows, HV)).reshape(B, T, HV)
        dtypes |= {"q": io, "k": io, "v": io, "beta": io}
        if problem.initial_state:
            made["initial_state"] = _state(problem, _values(problem, "h0", (sequences, HV, K, V)))
    if in_kernel and problem.A_log:
        made["A_log"] = _values(problem, "A_log", (HV,))
    if in_kernel and problem.dt_bias:
        made["dt_bias"] = _values(problem, "dt_bias", (HV, K)).reshape(HV * K)
    if problem.loss in ("both", "o"):
        width = K if problem.entry == "gate" else V
        made["do"] = _values(problem, "do", (rows, HV, width)).reshape(B, T, HV, width)
        dtypes["do"] = torch.float32 if problem.entry == "gate" else io
    if problem.loss in ("both", "state") and problem.final_state and problem.entry != "gate":
        made["dht"] = _state(problem, _values(problem, "dht", (sequences, HV, K, V)))
    inputs: dict[str, Tensor | None] = {
        name: torch.from_numpy(np.ascontiguousarray(x)).to(device).to(dtypes.get(name, torch.float32))
        for name, x in made.items()
    }
    if problem.packed:
        offsets = np.concatenate([[0], np.cumsum(problem.lengths, dtype=np.int64)])
        inputs["cu_seqlens"] = torch.from_numpy(offsets).to(device, OFFSETS[problem.offsets])
    return Case(problem, inputs, options_of(problem))


def options_of(problem: Problem) -> Options:
    return Options(
        scale=problem.scale,
        use_qk_l2norm_in_kernel=problem.l2norm,
        use_gate_in_kernel=problem.gate != "pregated",
        lower_bound=problem.lower_bound,
        use_beta_sigmoid_in_kernel=problem.beta_sigmoid,
        allow_neg_eigval=problem.neg_eigval,
        state_v_first=problem.v_first,
        chunk_size=problem.chunk_size,
        intermediates=problem.intermediates,
    )


def _state(problem: Problem, state: np.ndarray) -> np.ndarray:
    return np.swapaxes(state, -1, -2) if problem.v_first else state


def _values(problem: Problem, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([problem.seed, STREAMS.index(stream)])
    pattern = problem.menus()[stream][getattr(problem, stream)]
    values = np.array(pattern(rng, shape), np.float32, copy=True) if 0 not in shape else np.zeros(shape, np.float32)
    for edit in problem.edits:
        if edit.tensor == stream:
            if len(edit.index) != len(shape) or any(not 0 <= i < n for i, n in zip(edit.index, shape)):
                raise ValueError(f"Problem.edits index {edit.index} of {stream} is outside its shape {shape}")
            values[edit.index] = edit.value
    return values


def simplified(problem: Problem, **changes: object) -> Problem | None:
    """The problem with some fields changed, or None where that is no legal problem."""
    try:
        return replace(problem, **changes)
    except ValueError:
        return None
