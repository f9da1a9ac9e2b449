"""Authority on how somebody else's kernel is declared: what its arguments mean, and where its documentation ends."""

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from harness.problem import DTYPES, OFFSETS
from kda.precision import PrecisionSpec

# Where an operation on an input happens: the kernel does it on every call, on none, or if an argument asks for it; or
# its callers are told to do it before, as the adapter then does in fp32.
PLACES = ("always", "never", "flag", "before")
FINALS = ("returned", "written", "in_place", "pool")
TENSORS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias", "lower_bound")
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
OF_ENTRY: Mapping[str, tuple[str, ...]] = {
    "chunk": (
        *(*TENSORS, *PARAMETERS, *FLAGS, "scale", "allow_neg_eigval", "initial_state", "output_final_state"),
        *("cu_seqlens", "state_v_first", "safe_gate", "chunk_size", "return_intermediate_states"),
    ),
    "recurrent": (
        *(*TENSORS, *PARAMETERS, *FLAGS, "scale", "allow_neg_eigval", "initial_state", "output_final_state"),
        *("cu_seqlens", "state_v_first"),
    ),
    "decode": (
        *(*TENSORS, *PARAMETERS, *FLAGS, "scale", "allow_neg_eigval", "cu_seqlens", "state_v_first"),
        *("state_pool", "slots", "num_accepted_tokens"),
    ),
    "gate": ("g", *PARAMETERS),
}
EXTRA = ("out", "final_state", "state_indices")  # arguments that only some kernels have


@dataclass(frozen=True)
class Gate:
    """What a kernel takes for g.

    `log`: natural or log2. `cumulative`: inclusive sums that begin anew at every so many tokens of a sequence, or None.
    `activation` (PLACES): of raw gates; there `softplus` and `bounds`, the `lower_bound`s from..below that it takes
    (None: none), and `needs`, those of A_log and dt_bias that must be given. `lowest`: of activated natural-log gates.
    """

    log: str = "natural"
    cumulative: int | None = None
    activation: str = "flag"
    softplus: bool = True
    bounds: tuple[float, float] | None = (-math.inf, 0.0)
    needs: tuple[str, ...] = ()
    lowest: float = -math.inf


@dataclass(frozen=True)
class States:
    """How states are laid out and handed over.

    `v_first`: `[N, HV, V, K]`, or None if an argument says which. `dtype`: of the initial state. `final`: `returned`;
    `written` to an argument `final_state` made for it; `in_place` of the initial state; or both in slots of a `pool`,
    the initial state's argument, which `state_indices` (of `indices` dtype) names. `required`: there must be one.
    """

    v_first: bool | None = False
    dtype: str = "fp32"
    final: str = "returned"
    indices: str = "int32"
    required: bool = False


@dataclass(frozen=True)
class Domain:
    """What a kernel is documented for. A problem outside is not covered, and never held against it.

    `square`: K = V. `grouped`: several value heads to a query head. `shortest`: tokens of a sequence; `tokens`: of a
    call. `tail`: tokens behind the last offset. `unit`: dtypes for which q and k must be normalised. `pools`: dtypes
    of the states that are decoded in.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    gate_dtypes: tuple[str, ...] = tuple(DTYPES)
    K: Collection[int] = range(1, 257)
    V: Collection[int] = range(1, 257)
    square: bool = False
    grouped: bool = True
    shortest: int = 0
    tokens: int = 0
    tail: bool = True
    unit: tuple[str, ...] = ()
    pools: tuple[str, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Adapter:
    """A kernel and the meaning of its arguments; what is not said is as in `kda.chunk_kda` and its neighbours.

    `function`: the callable, or where it is (`module:attribute`), imported once it is needed. `precision`: where a
    correct implementation of its documented algorithm rounds. `arguments`: our name -> its name; `without`: ours that
    it does not have; `keywords`: its names that only its `**kwargs` take; `constants`: passed on every call.
    `l2norm`, `beta` (the sigmoid), `gate.activation`: one of PLACES. `scale_required`: it knows no default. `offsets`,
    `formats`: dtypes that arguments must have (int32 or int64; our name -> fp32). `by_head`: dt_bias is `[HV, K]`.
    `results`: what it returns, in order. `mutates`: ours that it writes over. `contiguous`: tensors must be.
    `entry`: chunk, recurrent, decode or gate; `route`: the id of its route, `name` by default.
    """

    name: str
    function: Callable | str
    precision: PrecisionSpec
    entry: str = "chunk"
    route: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    gate: Gate = Gate()
    l2norm: str = "flag"
    beta: str = "flag"
    neg_eigval: bool = True
    states: States = States()
    scale_required: bool = False
    offsets: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    by_head: bool = False
    results: tuple[str, ...] = ("o", "ht", "h")
    mutates: tuple[str, ...] = ()
    contiguous: bool = False
    differentiable: bool = True
    domain: Domain = Domain()

    def __post_init__(self):
        """ValueError for a declaration that contradicts itself."""
        menus = {
            "entry": (self.entry, OF_ENTRY),
            "l2norm": (self.l2norm, PLACES),
            "beta": (self.beta, PLACES),
            "gate.activation": (self.gate.activation, PLACES),
            "gate.log": (self.gate.log, ("natural", "log2")),
            "states.final": (self.states.final, FINALS),
            "states.dtype": (self.states.dtype, DTYPES),
            "states.indices": (self.states.indices, OFFSETS),
            "offsets": (self.offsets, (None, *OFFSETS)),
        }
        for name, (value, menu) in menus.items():
            if value not in menu:
                raise ValueError(f"{self.name}: {name} is {value!r}; it must be one of {', '.join(map(str, menu))}")
        known = {*OF_ENTRY[self.entry], *EXTRA}
        for name, given in (
            ("arguments", self.arguments),
            ("without", self.without),
            ("formats", self.formats),
            ("mutates", self.mutates),
        ):
            if set(given) - known:
                strange = ", ".join(sorted(set(given) - known))
                raise ValueError(f"{self.name}: {name} has {strange}; of a {self.entry} function it may name {known}")
        place = {"written": "final_state", "pool": "state_indices"}.get(self.states.final)
        if self.entry in ("chunk", "recurrent") and place is not None and place not in self.arguments:
            raise ValueError(f"{self.name}: states.final is {self.states.final!r}; arguments must say what {place} is")

    @property
    def id(self) -> str:
        return self.route or self.name

    def theirs(self, name: str) -> str | None:
        """Its name of our argument; None if it has none."""
        if name in self.without or (name in EXTRA and name not in self.arguments):
            return None
        return self.arguments.get(name, name)

    @property
    def call(self) -> Callable:
        """The kernel with the arguments of `kda.chunk_kda` and its neighbours."""
        from harness.adapters.translate import Adapted

        return Adapted(self)

    @property
    def origin(self) -> str:
        """Where the function is, for a reader."""
        function = self.function
        return function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))

    @cached_property
    def implementation(self) -> Callable:
        """The function itself. ValueError where it cannot be had, or does not have the arguments declared."""
        function = self.function if callable(self.function) else imported(self.name, self.function)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # of a built-in: it says nothing
            return function
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        missing = sorted(self._passed() - named)
        if missing:
            swallows = any(p.kind is p.VAR_KEYWORD for p in parameters)
            how = "only swallows" if swallows else "does not have"
            said = "; name them in `keywords` if it is documented to take them" if swallows else ""
            raise ValueError(f"{self.name}: {self.origin} {how} {', '.join(missing)}{said}")
        return function

    def _passed(self) -> set[str]:
        """Every name that a call may use, those apart that its `**kwargs` are documented to take."""
        flags = dict(zip(FLAGS, (self.l2norm, self.gate.activation, self.beta)))
        unused = {flag for flag, place in flags.items() if place != "flag"}
        unused |= {"allow_neg_eigval"} if not self.neg_eigval or self.beta in ("never", "before") else set()
        unused |= {"state_v_first"} if self.states.v_first is not None else set()
        unused |= {"output_final_state"} if self.states.final != "returned" else set()
        unused |= set(PARAMETERS) if self.gate.activation in ("never", "before") and self.entry != "gate" else set()
        unused |= {"lower_bound"} if self.gate.bounds is None else set()
        names = {self.theirs(name) for name in {*OF_ENTRY[self.entry], *EXTRA} - unused}
        return (names | set(self.constants)) - {None, *self.keywords}


def imported(name: str, where: str) -> Callable:
    """What is at `module:attribute`. ValueError, with the name of the subject, where there is nothing."""
    module, _, attribute = where.partition(":")
    try:
        value: object = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever an import of kernels may raise
        raise ValueError(f"subject is {name!r}, which cannot be imported: {error}") from None
    return value
