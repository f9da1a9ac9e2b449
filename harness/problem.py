"""Authority on problems: what a test input is, how it is written down, and how its tensors are made."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness import patterns
from kda.contract import MAX_DECODE_TOKENS
from oracle.operator import Options

ENTRIES = ("recurrent", "chunk", "gate", "decode")
GATES = ("pregated", "softplus", "lower_bound")
LOSSES = ("both", "o", "state", "none")
PRECISIONS = ("ieee", "tf32")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_DTYPES = ("fp32", "bf16")
OFFSETS = {"int64": torch.int64, "int32": torch.int32}
STREAMS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0", "do", "dht")  # place = stream of the seed: only append
MAX_JSON_BYTES = 2**20
MAX_TOKENS, MAX_HEADS, MAX_DIM, MAX_EDITS = 2**21, 4096, 256, 4096
MAX_ELEMENTS = 2**33  # of one tensor: beyond any machine's memory, and beyond every 32-bit offset
FLAGS = (
    *("packed", "safe_gate", "l2norm", "beta_sigmoid", "neg_eigval"),
    *("initial_state", "final_state", "v_first", "intermediates"),
)
EDIT_FIELDS = {"tensor", "index", "value"}
NON_FINITE = {name: float(name) for name in ("inf", "-inf", "nan")}  # JSON has no numbers for them

Fault = tuple[str, object, str]  # a field, its value, what it must be


def _is_integer(x: object, low: int, high: int) -> bool:
    return type(x) is int and low <= x <= high


def _is_number(x: object) -> bool:
    return type(x) is float or _is_integer(x, -(2**63), 2**63)


@dataclass(frozen=True)
class Edit:
    """One element set by hand after everything else.

    `tensor` is a stream name. `index` is (row, head, channel), rows counted over the whole batch; (row, head) for beta;
    (sequence, head, k, v) for the states, whatever their layout in the call; (head,) for A_log; (head, channel) for
    dt_bias.
    """

    tensor: str
    index: tuple[int, ...]
    value: float

    def __post_init__(self):
        if self.tensor not in STREAMS:
            raise ValueError(f"Edit.tensor is {self.tensor!r}; it must be one of {', '.join(STREAMS)}")
        if not isinstance(self.index, (tuple, list)) or any(type(i) is not int or i < 0 for i in self.index):
            raise ValueError(f"Edit.index is {self.index!r}; it must be a tuple of integers from 0")
        if not _is_number(self.value):
            raise ValueError(f"Edit.value is {self.value!r}; it must be a number")
        object.__setattr__(self, "index", tuple(self.index))
        object.__setattr__(self, "value", float(self.value))

    def __repr__(self) -> str:
        """Valid Python for infinities and NaN too."""
        value = repr(self.value) if math.isfinite(self.value) else f"float({str(self.value)!r})"
        return f"Edit({self.tensor!r}, {self.index!r}, {value})"


@dataclass(frozen=True)
class Problem:
    """An input of the operator in plain scalars and names, structure first; the defaults are the simplest one there is.

    `lengths`: one per sequence; equal ones make a dense batch unless `packed`. `tail`: tokens after the last packed
    sequence. HV = heads * group. `loss`: which outputs gradients come from. Of entry 'decode' (`harness.serving`):
    `state_dtype` of the pool; each call takes `step` tokens of a sequence and `rejected` drafts after them.
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
    precision: str = "ieee"
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
    state_dtype: str = "fp32"
    step: int = 1
    rejected: int = 0
    seed: int = 0
    edits: tuple[Edit, ...] = ()

    def __repr__(self) -> str:
        """Valid Python, the fields that differ from the default only."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Problem({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def __post_init__(self):
        for name in ("lengths", "edits"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise ValueError(f"Problem.{name} is {value!r}; it must be a tuple")
            object.__setattr__(self, name, tuple(value))
        for faults in (self._faults_of_structure, self._faults_of_modes, self._faults_of_values):
            for name, wrong, must in faults():
                raise ValueError(f"Problem.{name} is {wrong!r}; it must be {must}")

    def _faults_of_structure(self) -> Iterator[Fault]:
        if not all(_is_integer(length, 0, MAX_TOKENS) for length in self.lengths) or sum(self.lengths) > MAX_TOKENS:
            yield "lengths", self.lengths, f"token counts of at most {MAX_TOKENS} together"
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                yield name, getattr(self, name), "True or False"
        if not self.packed and len(set(self.lengths)) != 1:
            yield "lengths", self.lengths, "at least one and all equal, unless packed is True"
        if not _is_integer(self.tail, 0, MAX_TOKENS) or (self.tail and not self.packed):
            yield "tail", self.tail, "a token count, and 0 unless packed is True"
        for name, high in (("heads", MAX_HEADS), ("group", MAX_HEADS), ("K", MAX_DIM), ("V", MAX_DIM)):
            if not _is_integer(getattr(self, name), 1, high):
                yield name, getattr(self, name), f"an integer in 1..{high}"
        for name in ("q", "g", "v", "h0"):
            shape = self.shape(name)
            if math.prod(shape) > MAX_ELEMENTS:
                yield "lengths", self.lengths, f"few enough for {name} {list(shape)} to have {MAX_ELEMENTS} elements"

    def _faults_of_modes(self) -> Iterator[Fault]:
        menus = {"entry": ENTRIES, "gate": GATES, "loss": LOSSES, "precision": PRECISIONS}
        menus |= {"dtype": DTYPES, "gate_dtype": DTYPES, "offsets": OFFSETS, "state_dtype": STATE_DTYPES}
        for name, menu in menus.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in menu:
                yield name, getattr(self, name), f"one of {', '.join(menu)}"
        if type(self.chunk_size) is not int or self.chunk_size not in (32, 64):
            yield "chunk_size", self.chunk_size, "32 or 64"
        bound, given = self.lower_bound, self.lower_bound is not None
        if (self.gate == "lower_bound") != given or (given and not (_is_number(bound) and -math.inf < bound < 0)):
            yield "lower_bound", bound, "a finite number below 0 with gate='lower_bound', else None"
        if self.entry == "gate" and self.gate == "pregated":
            yield "gate", self.gate, "softplus or lower_bound with entry='gate'"
        if self.entry == "chunk" and self.safe_gate and not self.bounded:
            yield "safe_gate", True, f"False, unless no gate is below {patterns.BOUND:g}"
        if self.neg_eigval and not self.beta_sigmoid:
            yield "neg_eigval", True, "False, unless beta_sigmoid is True"
        if self.intermediates and self.entry != "chunk":
            yield "intermediates", True, "False, unless entry is 'chunk'"
        if self.precision != "ieee" and (self.entry, self.dtype) != ("chunk", "fp32"):
            yield "precision", self.precision, "'ieee', unless entry is 'chunk' and dtype is 'fp32'"
        yield from self._faults_of_decoding()
        if self.scale is not None and not (_is_number(self.scale) and math.isfinite(self.scale)):
            yield "scale", self.scale, "a finite number, or None"

    def _faults_of_decoding(self) -> Iterator[Fault]:
        most = MAX_DECODE_TOKENS
        if not (_is_integer(self.step, 1, most) and _is_integer(self.rejected, 0, most - self.step)):
            yield "step", (self.step, self.rejected), f"a count from 1 that makes at most {most} with rejected, from 0"
        if self.entry != "decode":
            for field in fields(self):
                if field.name in ("state_dtype", "step", "rejected") and getattr(self, field.name) != field.default:
                    yield field.name, getattr(self, field.name), f"{field.default!r}, unless entry is 'decode'"
            return
        for name, must in (("initial_state", True), ("final_state", True), ("loss", "none")):
            if getattr(self, name) != must:
                yield name, getattr(self, name), f"{must!r} with entry='decode'"

    def _faults_of_values(self) -> Iterator[Fault]:
        for name, menu in self.menus().items():
            value = getattr(self, name)
            optional = name == "dt_bias" or (name == "A_log" and self.gate != "softplus")
            if not (value is None and optional) and not (isinstance(value, str) and value in menu):
                yield name, value, f"one of {', '.join(menu)}{', or None' if optional else ''}"
        if not _is_integer(self.seed, 0, 2**32 - 1):
            yield "seed", self.seed, "an integer in 0..2^32 - 1"
        if len(self.edits) > MAX_EDITS or not all(isinstance(edit, Edit) for edit in self.edits):
            yield "edits", self.edits, f"at most {MAX_EDITS} of Edit"
        for edit in self.edits:
            shape = self.shape(edit.tensor)
            if len(edit.index) != len(shape) or any(i >= n for i, n in zip(edit.index, shape)):
                yield "edits", edit, f"inside the shape {list(shape)} of {edit.tensor}"

    def shape(self, stream: str) -> tuple[int, ...]:
        """The shape that a stream's pattern fills: rows are the tokens of the whole batch."""
        rows, HV = math.prod(self.batch), self.value_heads
        state = (len(self.lengths), HV, self.K, self.V)
        shapes = {"q": (rows, self.heads, self.K), "g": (rows, HV, self.K), "v": (rows, HV, self.V), "beta": (rows, HV)}
        shapes |= {"k": shapes["q"], "do": shapes["g" if self.entry == "gate" else "v"], "h0": state, "dht": state}
        return (shapes | {"A_log": (HV,), "dt_bias": (HV, self.K)})[stream]

    def menus(self) -> dict[str, Mapping[str, patterns.Pattern]]:
        """The patterns that each tensor of this problem may have."""
        gates = patterns.GATES if self.gate == "pregated" else patterns.RAW_GATES
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
    def bounded(self) -> bool:
        """Whether every gate is known to be in [-5, 0], as safe_gate promises."""
        if self.lower_bound is not None:
            return self.lower_bound >= patterns.BOUND
        return self.gate == "pregated" and self.g not in patterns.BELOW_BOUND

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

    def as_dict(self) -> dict[str, object]:
        """The fields as JSON knows them: infinite and NaN edits are strings."""
        fields_ = asdict(self)
        for edit in fields_["edits"]:
            edit["value"] = edit["value"] if math.isfinite(edit["value"]) else str(edit["value"])
        return fields_

    def to_json(self, found: Mapping[str, object] | None = None) -> str:
        document = {"schema": 1, "problem": self.as_dict(), "found": dict(found or {})}
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Problem":
        """The problem of a JSON document; anything that is not exactly one is a ValueError that says what is wrong."""
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"problem JSON has {len(text)} characters; it must have at most {MAX_JSON_BYTES}")
        try:
            document = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"problem JSON cannot be read: {error}") from None
        shaped = isinstance(document, dict) and isinstance(document.get("problem"), dict)
        if not shaped or document.get("schema") != 1:
            raise ValueError('problem JSON must be {"schema": 1, "problem": {...}, "found": {...}}')
        given = dict(document["problem"])
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"problem JSON has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
        edits = given.pop("edits", [])
        if not isinstance(edits, list) or not all(isinstance(e, dict) and set(e) == EDIT_FIELDS for e in edits):
            raise ValueError(
                f"problem JSON has edits of the wrong kind; each must have {', '.join(sorted(EDIT_FIELDS))}"
            )
        try:
            made = [Edit(e["tensor"], e["index"], NON_FINITE.get(e["value"], e["value"])) for e in edits]
            return cls(**given, edits=tuple(made))
        except TypeError as error:
            raise ValueError(f"problem JSON has a field of the wrong kind: {error}") from None

    @classmethod
    def load(cls, path: Path | str) -> "Problem":
        path = Path(path)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path} has {size} bytes; a problem has at most {MAX_JSON_BYTES}")
        try:
            return cls.from_json(path.read_text())
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Case:
    """A problem's tensors: `inputs` for the oracle and the kernels alike, `options` for the oracle."""

    problem: Problem
    inputs: dict[str, Tensor | None]
    options: Options


def materialise(problem: Problem, device: torch.device | str = "cpu") -> Case:
    """The tensors of a problem, each from its own stream of the seed, rounded to its dtype."""
    B, T = problem.batch
    io, gate_dtype = DTYPES[problem.dtype], DTYPES[problem.gate_dtype]
    dtypes = dict.fromkeys(("q", "k", "v", "beta", "do"), io) | {"g": gate_dtype}
    dtypes |= {} if problem.entry != "gate" else {"do": torch.float32}
    dtypes |= {"initial_state": DTYPES[problem.state_dtype]}
    made = {}
    for name in streams(problem):
        values = values_of(problem, name)
        if name in ("h0", "dht"):
            values = np.swapaxes(values, -1, -2) if problem.v_first else values
        elif name == "dt_bias":
            values = values.reshape(-1)
        elif name != "A_log":
            values = values.reshape(B, T, *values.shape[1:])
        made["initial_state" if name == "h0" else name] = values
    inputs: dict[str, Tensor | None] = {
        name: torch.from_numpy(np.ascontiguousarray(x)).to(device).to(dtypes.get(name, torch.float32))
        for name, x in made.items()
    }
    if problem.packed:
        offsets = np.concatenate([[0], np.cumsum(problem.lengths, dtype=np.int64)])
        inputs["cu_seqlens"] = torch.from_numpy(offsets).to(device, OFFSETS[problem.offsets])
    return Case(problem, inputs, options_of(problem))


def streams(problem: Problem) -> list[str]:
    """The tensors that a call of this problem has, by stream name."""
    names, whole = ["g"], problem.entry != "gate"
    if whole:
        names += ["q", "k", "v", "beta"] + (["h0"] if problem.initial_state else [])
    if problem.gate != "pregated":
        names += [name for name in ("A_log", "dt_bias") if getattr(problem, name)]
    if problem.loss in ("both", "o"):
        names.append("do")
    if problem.loss in ("both", "state") and problem.final_state and whole:
        names.append("dht")
    return names


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


def values_of(problem: Problem, stream: str) -> np.ndarray:
    """The float32 values of one stream before they are rounded to the tensor's dtype, in the stream's own shape."""
    values = pattern_values(problem, stream, getattr(problem, stream))
    for edit in problem.edits:
        if edit.tensor == stream:
            values[edit.index] = edit.value
    return values


def pattern_values(problem: Problem, stream: str, name: str) -> np.ndarray:
    """What pattern `name` would fill this stream with, without the edits."""
    shape = problem.shape(stream)
    if 0 in shape:
        return np.zeros(shape, np.float32)
    rng = np.random.default_rng([problem.seed, STREAMS.index(stream)])
    return np.array(problem.menus()[stream][name](rng, shape), np.float32, copy=True)
