"""Authority on implementations under test: how each is found by name, what it can do, and how a problem becomes a
call of it.
"""

import contextlib
import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata

import torch
import triton
from torch import Tensor

from harness.bits import differing_bytes
from harness.problem import Case, Problem
from kda.precision import PrecisionSpec

DIFFERENTIABLE = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "g": "dg",
    "beta": "dbeta",
    "A_log": "dA_log",
    "dt_bias": "ddt_bias",
    "initial_state": "dh0",
}
ENTRY_OF_NAME = {"chunk_kda": "chunk", "fused_recurrent_kda": "recurrent", "fused_kda_gate": "gate"}
ENTRY_POINTS = "kda.subjects"


class NotCovered(Exception):
    """The subject lacks what the problem asks for; counted, and never a pass."""


class RouteDidNotRun(Exception):
    """The launch record lacks the route that a check claims."""


@dataclass(frozen=True)
class Route:
    """One implementation of an entry point by a subject. `lacks` says why it cannot take a problem, or None."""

    id: str
    entry: str
    function: Callable
    spec: PrecisionSpec
    lacks: Callable[[Problem], str | None] = lambda problem: None
    differentiable: bool = True
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext

    def quantities(self, problem: Problem) -> frozenset[str]:
        wanted = problem.quantities()
        return wanted if self.differentiable else frozenset(name for name in wanted if not name.startswith("d"))


@dataclass(frozen=True)
class Subject:
    """An implementation under test, with its routes; a foreign one runs in a child process."""

    name: str
    version: str
    routes: tuple[Route, ...]
    foreign: bool = True

    def route(self, route_id: str, entry: str) -> Route:
        """The route of this id that serves `entry`."""
        for route in self.routes:
            if (route.id, route.entry) == (route_id, entry):
                return route
        have = ", ".join(sorted({f"{route.id} ({route.entry})" for route in self.routes}))
        raise ValueError(f"route is {route_id!r} for entry {entry!r}; {self.name} has {have}")


@dataclass
class Run:
    """What a call returned: outputs by quantity, seconds (and those of them that Triton's compiler took), inputs that
    were changed,

    peak bytes on a GPU."""

    outputs: dict[str, Tensor]
    seconds: float
    compile_seconds: float = 0.0
    modified: tuple[str, ...] = ()
    peak_bytes: int = 0


def keywords(case: Case, entry: str) -> dict[str, object]:
    """The arguments of a call other than differentiable tensors, by the names that kda and fla share."""
    problem, inputs, options = case.problem, case.inputs, case.options
    if entry == "gate":
        return {"lower_bound": options.lower_bound}
    words: dict[str, object] = {
        "scale": options.scale,
        "output_final_state": problem.final_state,
        "use_qk_l2norm_in_kernel": options.use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": options.use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": options.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": options.allow_neg_eigval,
        "lower_bound": options.lower_bound,
        "state_v_first": options.state_v_first,
        "cu_seqlens": inputs.get("cu_seqlens"),
    }
    if entry == "chunk":
        words |= {"safe_gate": problem.safe_gate, "chunk_size": problem.chunk_size}
        words |= {"return_intermediate_states": True} if problem.intermediates else {}
    return words


@dataclass
class CompileClock:
    """Seconds that Triton's compiler took."""

    seconds: float = 0.0


@contextlib.contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Counts compilation inside the block; what came from the cache costs nothing and counts nothing."""
    clock, before = CompileClock(), triton.knobs.compilation.listener

    def listen(*, times, **_) -> None:
        clock.seconds += times.total / 1e6

    triton.knobs.compilation.listener = listen
    try:
        yield clock
    finally:
        triton.knobs.compilation.listener = before


def call(route: Route, case: Case) -> Run:
    """Run a problem on a route, forward and, if the problem has a loss, backward."""
    reason = route.lacks(case.problem)
    if reason:
        raise NotCovered(reason)
    gradients = case.problem.gradients and route.differentiable
    before = {name: None if x is None else x.clone() for name, x in case.inputs.items()}
    leaves = {
        name: case.inputs[name].detach().requires_grad_(gradients)
        for name in DIFFERENTIABLE
        if case.inputs.get(name) is not None
    }
    cuda = case.inputs["g"].is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
    started = time.perf_counter()
    with route.context() as launches, compile_clock() as compiling:
        outputs = _forward_backward(route, case, leaves, gradients)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if launches is not None and case.inputs["g"].numel() and {launch.route for launch in launches} != {route.id}:
        ran = ", ".join(sorted({launch.route for launch in launches})) or "nothing"
        raise RouteDidNotRun(f"route {route.id} was forced, and the launch record shows {ran}")
    peak = torch.cuda.max_memory_allocated() - resting if cuda else 0
    modified = tuple(name for name, x in before.items() if x is not None and differing_bytes(x, case.inputs[name]))
    return Run(outputs, seconds, compiling.seconds, modified, peak)


def _forward_backward(route: Route, case: Case, leaves: Mapping[str, Tensor], gradients: bool) -> dict[str, Tensor]:
    returned = route.function(**leaves, **keywords(case, route.entry))
    results = returned if isinstance(returned, tuple) else (returned,)
    named = dict(zip(("o", "ht", "h"), results))
    outputs = {name: x.detach() for name, x in named.items() if x is not None}
    if gradients:
        roots = [(named[n], case.inputs[d]) for n, d in (("o", "do"), ("ht", "dht")) if case.inputs.get(d) is not None]
        roots = [(root, grad) for root, grad in roots if root is not None and root.requires_grad]
        if not roots:
            raise NotCovered("its outputs carry no gradient")
        grads = torch.autograd.grad(
            [r for r, _ in roots], list(leaves.values()), [g for _, g in roots], allow_unused=True
        )
        # An input that did not take part has gradient zero, as autograd itself says with materialize_grads.
        outputs |= {
            DIFFERENTIABLE[n]: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), grads)
        }
    return outputs


def own_subject() -> Subject:
    """kda's own routes, each forced, with the launch record as proof."""
    import kda
    from kda.gate import PRECISION as GATE_PRECISION

    def proving(route_id: str) -> Callable[[], AbstractContextManager]:
        @contextlib.contextmanager
        def forced_and_recorded():
            with kda.force_route(route_id), kda.record_launches() as launches:
                yield launches

        return forced_and_recorded

    functions = {"chunk": kda.chunk_kda, "recurrent": kda.fused_recurrent_kda, "gate": kda.fused_kda_gate}
    routes = []
    for route in kda.routes():
        for entry in sorted(route.entries):
            spec = GATE_PRECISION if entry == "gate" else route.precision
            routes.append(Route(route.id, entry, functions[entry], spec, context=proving(route.id)))
    return Subject("kda", _version("kda-harness"), tuple(routes), foreign=False)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


_CHUNK_STAGES = {
    **{"o": "io", "dq": "io", "dk": "io", "dv": "io", "ht": "fp32", "dh0": "fp32"},
    **{"operand": "dot", "stored_inverse": "dot"},
}


def foreign_specs() -> dict[str, PrecisionSpec]:
    """What kernels with fla's signatures are taken to round, unless a subject declares better: `dot` is tf32 for fp32
    tensors.
    """
    chunk = _CHUNK_STAGES
    return {
        "chunk-safe_gate": PrecisionSpec("chunk", chunk, chunk=64, diagonal="anchor", inverse="substitution"),
        "chunk-unbounded": PrecisionSpec("chunk", chunk, chunk=64, diagonal="pair", inverse="substitution"),
        "recurrent": PrecisionSpec("recurrent", {"o": "io", "ht": "fp32"}),
        "gate": PrecisionSpec("gate", {}),
    }


def _accepts(function: Callable) -> Callable[[Problem], str | None]:
    """Refuses a problem that needs an argument the function does not have."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def lacks(problem: Problem) -> str | None:
        parameters_of_gate = {"A_log": problem.A_log is not None, "dt_bias": problem.dt_bias is not None}
        needed = (
            parameters_of_gate
            if problem.entry == "gate"
            else {
                "A_log": problem.A_log is not None,
                "dt_bias": problem.dt_bias is not None,
                "use_qk_l2norm_in_kernel": problem.l2norm,
                "use_gate_in_kernel": problem.gate != "pregated",
                "use_beta_sigmoid_in_kernel": problem.beta_sigmoid,
                "allow_neg_eigval": problem.neg_eigval,
                "lower_bound": problem.lower_bound is not None,
                "state_v_first": problem.v_first,
                "cu_seqlens": problem.packed,
                "safe_gate": problem.safe_gate,
                "return_intermediate_states": problem.intermediates,
                "initial_state": problem.initial_state,
            }
        )
        missing = [name for name, wanted in needed.items() if wanted and name not in parameters]
        return None if anything or not missing else f"has no argument {', '.join(missing)}"

    return lacks


def _only_known(function: Callable) -> Callable:
    """Drop keywords that the function does not know; `lacks` has seen to it that none of them matters."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return function
    return lambda **kwargs: function(**{name: value for name, value in kwargs.items() if name in parameters})


def _and(*checks: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    return lambda problem: next((reason for check in checks if (reason := check(problem))), None)


def signature_subject(name: str, functions: Mapping[str, Callable], version: str = "") -> Subject:
    """A subject from callables with fla's signatures, by entry; `precision` on a function overrides the assumed
    PrecisionSpec.
    """
    specs, routes = foreign_specs(), []
    for entry, function in functions.items():
        lacks, known = _accepts(function), _only_known(function)
        declared = getattr(function, "precision", None)
        if entry == "chunk":
            safe = _and(
                lacks, lambda problem: None if problem.safe_gate else "the safe_gate path takes safe_gate problems"
            )
            free = _and(
                lacks,
                lambda problem: "the unbounded path takes problems without safe_gate" if problem.safe_gate else None,
            )
            routes.append(Route("chunk-safe_gate", entry, known, declared or specs["chunk-safe_gate"], safe))
            routes.append(Route("chunk-unbounded", entry, known, declared or specs["chunk-unbounded"], free))
        else:
            differentiable = getattr(function, "differentiable", True)
            routes.append(Route(entry, entry, known, declared or specs[entry], lacks, differentiable))
    return Subject(name, version, tuple(routes))


def _no_tokens(problem: Problem) -> str | None:
    return None if problem.batch[1] else "T = 0 is outside what its kernels are launched for"


def fla_subject() -> Subject:
    """fla's public operators; its recurrent kernel has no backward pass."""
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.kda.gate import fused_kda_gate
    except ImportError as error:
        raise ValueError(f"subject is 'fla', which cannot be imported: {error}") from None
    made = signature_subject(
        "fla", {"chunk": chunk_kda, "recurrent": fused_recurrent_kda, "gate": fused_kda_gate}, _version("fla-core")
    )
    routes = tuple(
        Route(r.id, r.entry, r.function, r.spec, _and(r.lacks, _no_tokens), r.entry != "recurrent") for r in made.routes
    )
    return Subject("fla", made.version, routes)


def _from_object(name: str, value: object) -> Subject:
    if isinstance(value, Subject):
        return value
    if callable(value) and getattr(value, "__name__", "") not in ENTRY_OF_NAME and not hasattr(value, "entry"):
        value = value()
        if isinstance(value, Subject):
            return value
    if callable(value):
        entry = getattr(value, "entry", None) or ENTRY_OF_NAME[value.__name__]
        return signature_subject(name, {entry: value})
    functions = {
        entry: getattr(value, attr) for attr, entry in ENTRY_OF_NAME.items() if callable(getattr(value, attr, None))
    }
    if not functions:
        raise ValueError(f"subject is {name!r}, which has none of {', '.join(ENTRY_OF_NAME)}")
    return signature_subject(name, functions, str(getattr(value, "__version__", "")))


def load_subject(name: str | None = None) -> Subject:
    """`kda`, `fla`, a name registered under the entry point group `kda.subjects`, `module` or `module:attribute`;
    default KDA_SUBJECT.
    """
    name = name or os.environ.get("KDA_SUBJECT") or "kda"
    if name == "kda":
        return own_subject()
    if name == "fla":
        return fla_subject()
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _from_object(name, point.load())
    module, _, attribute = name.partition(":")
    try:
        value: object = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"subject is {name!r}; it must be kda, fla, a registered name or module[:attribute] ({error})"
        ) from None
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            raise ValueError(f"subject is {name!r}, but {module} has no attribute {attribute}")
        value = getattr(value, part)
    return _from_object(name, value)


def known_subjects() -> Iterable[str]:
    return ("kda", "fla", *(point.name for point in metadata.entry_points(group=ENTRY_POINTS)))
