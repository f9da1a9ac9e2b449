"""Authority on other forms of a call, whose results follow from those of the call itself: no oracle needed."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
import triton
from torch import Tensor

from harness import interpreter
from harness.call import Route, Run, call, stages_of
from harness.problem import Case, Problem
from harness.rows import BY_TOKEN, heads_of, slice_heads, slice_output
from oracle.packing import Layout

TOKENS = ("q", "k", "v", "g", "beta", "do")  # inputs `[B, T, ...]`
STATES = ("initial_state", "dht")  # inputs `[N, HV, ...]`
PARAMETER_GRADIENTS = frozenset({"dA_log", "ddt_bias"})
WATCHED = "watched"  # the form under the interpreter's sanitizer
FACTOR = -0.125  # a power of two: no format rounds it
TAIL_ADDED = 3  # tokens

Selection = Callable[[Case, str, Tensor], Tensor | None]


def _always(problem: Problem) -> bool:
    return True


def _unchanged(case: Case, name: str, x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Variant:
    """A changed call. `expected` selects from a quantity of the call itself what must come, times `factors`, or says
    None where nothing is promised; `kept` is the part of the changed call's result that is held against it.

    `universal` ones hold for any deterministic kernel; the others for routes that are declared independent of batch,
    packing, other heads and later tokens. With `scaled` results are ordinary numbers up to underflow and overflow.
    """

    name: str
    promise: str
    applies: Callable[[Problem], bool] = _always
    change: Callable[[Case], Case] = lambda case: case
    expected: Selection = _unchanged
    kept: Selection = _unchanged
    factors: Mapping[str, float] = field(default_factory=dict)  # by quantity, powers of two and -1; others stay
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    universal: bool = False
    scaled: bool = False


def run(route: Route, case: Case, variant: Variant | None) -> Run:
    """The call of a case on a route, in that form."""
    if variant is None:
        return call(route, case)
    with variant.context():
        return call(route, variant.change(case))


def stages(route: Route, case: Case, variant: Variant | None) -> Run:
    """What the stages of that form left."""
    if variant is None:
        return stages_of(route, case)
    with variant.context():
        return stages_of(route, variant.change(case))


def applicable(route: Route, problem: Problem) -> list[Variant]:
    """What is promised of this problem on this route."""
    return [v for v in VARIANTS.values() if (v.universal or route.invariant) and v.applies(problem)]


def in_turn(route: Route, problem: Problem, turn: int) -> tuple[str, ...]:
    """The name of one form that applies, each as its turn comes; none where nothing is promised."""
    promised = applicable(route, problem)
    return (promised[turn % len(promised)].name,) if promised else ()


def _with(case: Case, inputs: Mapping[str, Tensor | None], **changes: object) -> Case:
    problem = replace(case.problem, edits=(), **changes) if changes else case.problem
    return replace(case, problem=problem, inputs={**case.inputs, **inputs})


def _times(factor: float, names: tuple[str, ...]) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        return _with(case, {n: case.inputs[n] * factor for n in names if case.inputs.get(n) is not None})

    return change


def _layout(case: Case) -> Layout:
    return Layout.of(*case.inputs["g"].shape[:2], case.inputs.get("cu_seqlens"))


def _in_order(problem: Problem) -> bool:
    return problem.entry != "gate" and max(problem.lengths, default=0) >= 2


def _cut(layout: Layout, n: int) -> int:
    """The row of sequence n, in the flattened batch, that begins its last third."""
    return layout.starts[n] + layout.lengths[n] - max(1, layout.lengths[n] // 3)


def _rows(layout: Layout, late: bool) -> Tensor:
    """bool `[rows]`: those of the last third of each sequence, or those before it; the tail is in neither."""
    mask = torch.zeros(layout.rows, dtype=torch.bool)
    for n, (start, length) in enumerate(zip(layout.starts, layout.lengths)):
        if length:
            mask[slice(_cut(layout, n), start + length) if late else slice(start, _cut(layout, n))] = True
    return mask


def _by_token(names: frozenset[str], late: bool) -> Selection:
    """Only these quantities, only at these rows."""

    def select(case: Case, name: str, x: Tensor) -> Tensor | None:
        return x.flatten(0, 1)[_rows(_layout(case), late).to(x.device)] if name in names else None

    return select


def _other_future(case: Case) -> Case:
    """Everything in the last third of each sequence replaced by something else that is legal."""
    late = _rows(_layout(case), late=True).to(case.inputs["g"].device)
    pregated = case.problem.gate == "pregated"
    other = {
        "q": lambda x: x.roll(1, -1) * 0.5,
        "k": lambda x: x.roll(1, -1) * 0.5,
        "v": lambda x: x * 0.5 + 1,
        "g": lambda x: torch.full_like(x, -4.0) if pregated else x * 0.5 + 1,
        "beta": lambda x: x * 0.5,
    }
    return _with(
        case, {name: _where_row(late, make(case.inputs[name]), case.inputs[name]) for name, make in other.items()}
    )


def _other_past_gradient(case: Case) -> Case:
    """The incoming gradient of o replaced before the last third of each sequence."""
    do = case.inputs["do"]
    early = _rows(_layout(case), late=False).to(do.device)
    return _with(case, {"do": _where_row(early, do * 0.5 + 1, do)})


def _where_row(mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    shape = (*other.shape[:2], *[1] * (other.dim() - 2))
    return torch.where(mask.view(shape), chosen, other)


def _last(problem: Problem) -> int | None:
    """The last sequence that has tokens."""
    return max((n for n, length in enumerate(problem.lengths) if length), default=None)


def _sequence_of(case: Case, name: str, x: Tensor, n: int) -> Tensor | None:
    """The part of an input or a quantity that belongs to sequence n, as a batch of one."""
    layout = _layout(case)
    start, length = layout.starts[n], layout.lengths[n]
    if name in TOKENS or name in BY_TOKEN or name == "dbeta":
        return x.flatten(0, 1)[None, start : start + length]
    if name in STATES or name in ("ht", "dh0"):
        return x[n : n + 1]
    if name == "h":
        slots = layout.chunk_slots(case.problem.chunk_size)
        return x.flatten(0, 1)[None, slots[n] : slots[n + 1]]
    return None


def _alone(case: Case) -> Case:
    """The last sequence as a dense batch of one."""
    n = _last(case.problem)
    parts = {name: _sequence_of(case, name, x, n) for name, x in case.inputs.items() if x is not None}
    inputs = {name: x.contiguous() for name, x in parts.items() if x is not None} | {"cu_seqlens": None}
    return _with(case, inputs, lengths=(case.problem.lengths[n],), packed=False, tail=0)


def _packed(case: Case) -> Case:
    """A dense batch as a packed one."""
    B, T = case.problem.batch
    inputs = {n: case.inputs[n].flatten(0, 1)[None] for n in TOKENS if case.inputs.get(n) is not None}
    offsets = torch.arange(B + 1, device=case.inputs["g"].device) * T
    return _with(case, {**inputs, "cu_seqlens": offsets}, packed=True)


def _flattened(case: Case, name: str, x: Tensor) -> Tensor:
    return x.flatten(0, 1)[None] if name in BY_TOKEN or name in ("dbeta", "h") else x


def _longer_tail(case: Case) -> Case:
    """Tokens of no sequence behind a packed batch: more of them, and all NaN."""
    used, made = _layout(case).used, {}
    for name in TOKENS:
        x = case.inputs.get(name)
        if x is not None:
            made[name] = x.new_full((1, x.shape[1] + TAIL_ADDED, *x.shape[2:]), math.nan)
            made[name][:, :used] = x[:, :used]
    return _with(case, made, tail=case.problem.tail + TAIL_ADDED)


def _with_tail(case: Case, name: str, x: Tensor) -> Tensor | None:
    if name in PARAMETER_GRADIENTS:
        return None
    if name not in BY_TOKEN and name != "dbeta":
        return x
    return torch.cat([x, x.new_zeros(1, TAIL_ADDED, *x.shape[2:])], 1)


def _poison(case: Case, inputs: Mapping[str, Tensor | None], names: tuple[str, ...], spoil: Callable) -> Case:
    spoiled = {name: inputs[name].clone() for name in names if inputs.get(name) is not None}
    for name, x in spoiled.items():
        spoil(name, x)
    return _with(case, spoiled)


def _poisoned_sequence(case: Case) -> Case:
    n = next(n for n, length in enumerate(case.problem.lengths) if length)

    def spoil(name: str, x: Tensor) -> None:
        _sequence_of(case, name, x, n).fill_(math.nan)

    return _poison(case, case.inputs, TOKENS + STATES, spoil)


def _other_sequences(case: Case, name: str, x: Tensor) -> Tensor | None:
    first = next(n for n, length in enumerate(case.problem.lengths) if length)
    rest = [_sequence_of(case, name, x, n) for n in range(len(case.problem.lengths)) if n != first]
    return None if name in PARAMETER_GRADIENTS else torch.cat([part.flatten() for part in rest])


def _poisoned_head(case: Case) -> Case:
    """Query head 0 and its value heads are NaN."""
    heads = heads_of(case.inputs, case.problem.entry)

    def spoil(name: str, x: Tensor) -> None:
        axis = 1 if name in STATES else 2
        x.narrow(axis, 0, 1 if name in ("q", "k") else heads.group).fill_(math.nan)

    return _poison(case, case.inputs, TOKENS + STATES, spoil)


def _other_heads(case: Case, name: str, x: Tensor) -> Tensor:
    heads = heads_of(case.inputs, case.problem.entry)
    return slice_output(name, x, list(range(1, heads.query)), heads)


def _last_head(case: Case) -> Case:
    inputs = slice_heads(case.inputs, [case.problem.heads - 1], case.problem.entry)
    return _with(case, inputs, heads=1)


def _of_last_head(case: Case, name: str, x: Tensor) -> Tensor:
    heads = heads_of(case.inputs, case.problem.entry)
    return slice_output(name, x, [heads.query - 1], heads)


def _strided(case: Case) -> Case:
    """Every tensor as a view with gaps, which hold what no kernel may read."""
    made = {}
    for name, x in case.inputs.items():
        if x is not None and x.dim():
            gap = math.nan if x.is_floating_point() else 2**20
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), gap)
            made[name] = wide[..., 1::2]
            made[name].copy_(x)
    return _with(case, made)


@contextlib.contextmanager
def _filled_with_nan() -> Iterator[None]:
    """Memory that torch allocates without a value holds NaN, or the largest integer."""
    mode = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Every access of a kernel checked, programs in another order."""
    with interpreter.sanitize(), interpreter.shuffle(1):
        yield


def _taken_back(case: Case) -> Case:
    """With drafts that are rejected where there were none, and without them where there were."""
    problem = case.problem
    return _with(case, {}, step=min(problem.step, 4), rejected=0 if problem.rejected else 3)


def _interpreted(problem: Problem) -> bool:
    return bool(triton.knobs.runtime.interpret)


def _scalable(problem: Problem) -> bool:
    """fp16 would lose digits of the scaled inputs."""
    return problem.entry != "gate" and problem.dtype != "fp16"


def _filled(problem: Problem) -> int:
    return sum(length > 0 for length in problem.lengths)


_GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
_FORWARD = ("o", "ht", "h")


def _factors(factor: float, *kept: str) -> dict[str, float]:
    """This factor for every quantity but those kept."""
    return {name: factor for name in (*_FORWARD, *_GRADIENTS) if name not in kept}


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            "scaled_values",
            "o, states and gradients but dv and dh0 are linear in (v, initial state)",
            _scalable,
            _times(FACTOR, ("v", "initial_state")),
            factors=_factors(FACTOR, "dv", "dh0"),
            universal=True,
            scaled=True,
        ),
        Variant(
            "scaled_loss",
            "gradients are linear in those of the outputs",
            lambda problem: problem.gradients and problem.dtype != "fp16",
            _times(FACTOR, ("do", "dht")),
            factors=_factors(FACTOR, *_FORWARD),
            universal=True,
            scaled=True,
        ),
        Variant(
            "negated_queries",
            "-q and -dht negate o and all gradients but dq",
            lambda problem: problem.entry != "gate",
            _times(-1.0, ("q", "dht")),
            factors=_factors(-1.0, "dq", "ht", "h"),
            universal=True,
        ),
        Variant(
            "negated_keys",
            "-k with a negated state, dht and do negates o, states, dk and dh0",
            lambda problem: problem.entry != "gate",
            _times(-1.0, ("k", "initial_state", "do", "dht")),
            factors=dict.fromkeys((*_FORWARD, "dk", "dh0"), -1.0),
            universal=True,
        ),
        Variant(
            "strided",
            "gaps between the elements of a tensor do not matter",
            change=_strided,
            universal=True,
        ),
        Variant(
            "nan_filled",
            "what memory held before does not matter",
            context=_filled_with_nan,
            universal=True,
        ),
        Variant(
            WATCHED,
            "no kernel leaves its memory, reads what nobody wrote, or races; the order of programs does not matter",
            _interpreted,
            context=_watched,
            universal=True,
        ),
        Variant(
            "causal",
            "o does not depend on later tokens",
            _in_order,
            _other_future,
            _by_token(frozenset({"o"}), late=False),
            _by_token(frozenset({"o"}), late=False),
        ),
        Variant(
            "causal_gradients",
            "gradients do not depend on earlier gradients of o",
            lambda problem: _in_order(problem) and problem.loss in ("both", "o"),
            _other_past_gradient,
            _by_token(frozenset({"dq", "dk", "dv", "dg", "dbeta"}), late=True),
            _by_token(frozenset({"dq", "dk", "dv", "dg", "dbeta"}), late=True),
        ),
        Variant(
            "alone",
            "a sequence does not depend on those beside it",
            lambda problem: problem.entry != "gate" and len(problem.lengths) > 1 and _last(problem) is not None,
            _alone,
            lambda case, name, x: _sequence_of(case, name, x, _last(case.problem)),
        ),
        Variant(
            "packed",
            "packing changes nothing",
            lambda problem: problem.entry != "gate" and not problem.packed,
            _packed,
            _flattened,
        ),
        Variant(
            "nan_tail",
            "tokens of no sequence change nothing, and give 0",
            lambda problem: problem.packed,
            _longer_tail,
            _with_tail,
        ),
        Variant(
            "nan_sequence",
            "NaN in one sequence stays there",
            lambda problem: problem.entry != "gate" and _filled(problem) > 1,
            _poisoned_sequence,
            _other_sequences,
            _other_sequences,
        ),
        Variant(
            "nan_head",
            "NaN in one head stays there",
            lambda problem: problem.heads > 1,
            _poisoned_head,
            _other_heads,
            _other_heads,
        ),
        Variant(
            "head_alone",
            "a head does not depend on those beside it",
            lambda problem: problem.heads > 1,
            _last_head,
            _of_last_head,
        ),
        Variant(
            "one_token_a_call",
            "decoding tokens together or one by one gives the same",
            lambda problem: problem.step > 1,
            lambda case: _with(case, {}, step=1),
        ),
        Variant(
            "drafts",
            "drafts that are rejected leave no trace",
            lambda problem: problem.entry == "decode",
            _taken_back,
        ),
    )
}
