"""Authority on implementations under test: how each is found by name, what it can do, and what it may round."""

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import metadata

import torch
from torch import Tensor

from harness import fitting
from harness.call import DIFFERENTIABLE, Route, keywords
from harness.problem import Case, Problem
from harness.serving import Served
from kda.precision import PrecisionSpec

__all__ = ["DIFFERENTIABLE", "Route", "Subject", "keywords", "known_subjects", "load_subject", "own_subject"]

ENTRY_OF_NAME = {
    **{"chunk_kda": "chunk", "fused_recurrent_kda": "recurrent", "fused_kda_gate": "gate"},
    "kda_decode": "decode",
}
ENTRY_POINTS = "kda.subjects"


@dataclass(frozen=True)
class Subject:
    """An implementation under test, with its routes; a foreign one runs in a child process."""

    name: str
    version: str
    routes: tuple[Route, ...]
    foreign: bool = True

    @property
    def title(self) -> str:
        """Name and version, as reports and tables have it."""
        return f"{self.name} {self.version}".strip()

    def route(self, route_id: str, entry: str) -> Route:
        """The route of this id that serves `entry`."""
        for route in self.routes:
            if (route.id, route.entry) == (route_id, entry):
                return route
        have = ", ".join(sorted({f"{route.id} ({route.entry})" for route in self.routes}))
        raise ValueError(f"route is {route_id!r} for entry {entry!r}; {self.name} has {have}")


def own_subject() -> Subject:
    """kda's own routes, each forced, with the launch record as proof."""
    import kda
    from kda.chunk_fwd import SAFE_GATE, UNBOUNDED, anchored
    from kda.decode import PRECISION as DECODE_PRECISION
    from kda.gate import PRECISION as GATE_PRECISION

    def proving(route_id: str) -> Callable[[], AbstractContextManager]:
        @contextlib.contextmanager
        def forced_and_recorded():
            with kda.force_route(route_id), kda.record_launches() as launches:
                yield launches

        return forced_and_recorded

    functions = {"chunk": kda.chunk_kda, "recurrent": kda.fused_recurrent_kda, "gate": kda.fused_kda_gate}
    specs = {"gate": GATE_PRECISION, "decode": DECODE_PRECISION}
    routes = []
    for route in kda.routes():
        for entry in sorted(route.entries):
            spec = specs.get(entry, route.precision)
            bounded = _wants_bounded if anchored(route.id) else _takes_all
            lacks = _and(fitting.lacks_fused, bounded) if route.id.startswith("fused") else bounded
            shown = {"context": proving(route.id), "invariant": route.id != "torch"}
            if entry == "decode":
                shown |= {"origin": "kda:kda_decode", "differentiable": False}
                routes.append(Route(route.id, entry, Served(kda.kda_decode), spec, **shown))
                continue
            function, origin = functions[entry], f"kda:{functions[entry].__name__}"
            stages = _staged(route.id) if entry == "chunk" and route.id in (SAFE_GATE, UNBOUNDED) else None
            routes.append(Route(route.id, entry, function, spec, lacks, origin=origin, stages=stages, **shown))
    return Subject("kda", _version("kda-harness"), tuple(routes), foreign=False)


def _staged(route_id: str) -> Callable[[Case], dict[str, Tensor]]:
    """The intermediates of kda's staged kernels."""
    from kda import contract
    from kda.chunk_stages import chunk_stages

    def stages(case: Case) -> dict[str, Tensor]:
        tensors = {name: case.inputs.get(name) for name in DIFFERENTIABLE}
        words = keywords(case, "chunk")
        words["scale"] = contract.default_scale(tensors["q"], case.options.scale)
        call = contract.validate(contract.Call("chunk", **tensors, **words))
        do = case.inputs.get("do")
        if do is None and case.problem.gradients:
            do = torch.zeros_like(tensors["v"])
        return chunk_stages(call, route_id, do=do, dht=case.inputs.get("dht"))

    return stages


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
    """What kernels with fla's signatures are taken to round, unless a subject declares better.

    Their chunk_size is the chunk of the algorithm, and so where it rounds.
    """
    chunk = _CHUNK_STAGES
    return {
        "chunk-safe_gate": PrecisionSpec("chunk", chunk, diagonal="anchor", inverse="substitution"),
        "chunk-unbounded": PrecisionSpec("chunk", chunk, diagonal="pair", inverse="substitution"),
        "recurrent": PrecisionSpec("recurrent", {"o": "io", "ht": "fp32"}),
        "gate": PrecisionSpec("gate", {}),
        "decode": PrecisionSpec("recurrent", {"o": "io", "ht": "pool", "carried": "pool"}),
    }


def _accepts(function: Callable) -> Callable[[Problem], str | None]:
    """Refuses a problem that needs an argument the function does not have."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def lacks(problem: Problem) -> str | None:
        needed = {
            "A_log": problem.A_log is not None,
            "dt_bias": problem.dt_bias is not None,
            "lower_bound": problem.lower_bound is not None,
        }
        if problem.entry != "gate":
            needed |= {
                "scale": problem.scale is not None,
                "use_qk_l2norm_in_kernel": problem.l2norm,
                "use_gate_in_kernel": problem.gate != "pregated",
                "use_beta_sigmoid_in_kernel": problem.beta_sigmoid,
                "allow_neg_eigval": problem.neg_eigval,
                "state_v_first": problem.v_first,
                "cu_seqlens": problem.packed,
                "initial_state": problem.initial_state and problem.entry != "decode",
                "num_accepted_tokens": problem.rejected > 0,
            }
        if problem.entry == "chunk":
            needed |= {
                "safe_gate": problem.safe_gate,
                "return_intermediate_states": problem.intermediates,
                "chunk_size": problem.intermediates and problem.chunk_size != 64,
                "precision": problem.precision != "ieee",
            }
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


def _takes_all(problem: Problem) -> None:
    return None


def _wants_bounded(problem: Problem) -> str | None:
    known = problem.safe_gate or (problem.lower_bound is not None and problem.bounded)
    return None if known else "takes gates known to be in [-5, 0]: safe_gate or such a lower_bound"


def _wants_safe_gate(problem: Problem) -> str | None:
    return None if problem.safe_gate else "the safe_gate path takes safe_gate problems"


def _wants_no_safe_gate(problem: Problem) -> str | None:
    return "the unbounded path takes problems without safe_gate" if problem.safe_gate else None


def signature_subject(
    name: str, functions: Mapping[str, Callable], version: str = "", origins: Mapping[str, str] | None = None
) -> Subject:
    """A subject from callables with fla's signatures, by entry.

    On a function `precision` overrides the assumed PrecisionSpec, `differentiable = False` drops the gradients, and
    `stages` exposes intermediates (see `Route`). `origins`: entry -> `module:attribute` of the function.
    """
    specs, routes = foreign_specs(), []
    for entry, function in functions.items():
        lacks, known = _accepts(function), _only_known(function)
        declared = getattr(function, "precision", None)
        shown = {"origin": (origins or {}).get(entry, ""), "stages": getattr(function, "stages", None)}
        if entry == "chunk":
            safe, free = _and(lacks, _wants_safe_gate), _and(lacks, _wants_no_safe_gate)
            routes.append(Route("chunk-safe_gate", entry, known, declared or specs["chunk-safe_gate"], safe, **shown))
            routes.append(Route("chunk-unbounded", entry, known, declared or specs["chunk-unbounded"], free, **shown))
        else:
            differentiable = entry != "decode" and getattr(function, "differentiable", True)
            if entry == "decode":
                known = Served(known)
            routes.append(Route(entry, entry, known, declared or specs[entry], lacks, differentiable, **shown))
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
    functions = {"chunk": chunk_kda, "recurrent": fused_recurrent_kda, "gate": fused_kda_gate}
    module = {"chunk": "fla.ops.kda", "recurrent": "fla.ops.kda", "gate": "fla.ops.kda.gate"}
    origins = {entry: f"{module[entry]}:{function.__name__}" for entry, function in functions.items()}
    made = signature_subject("fla", functions, _version("fla-core"), origins)
    routes = (
        replace(route, lacks=_and(route.lacks, _no_tokens), differentiable=route.entry != "recurrent")
        for route in made.routes
    )
    return replace(made, routes=tuple(routes))


def _entry_of(function: Callable) -> str | None:
    """The entry that a function serves, by its `entry`, its name or its arguments; None for anything else."""
    parameters = set(inspect.signature(function).parameters)
    named = getattr(function, "entry", None) or ENTRY_OF_NAME.get(getattr(function, "__name__", ""))
    if named:
        return named
    if {"q", "k", "v", "g", "beta"} <= parameters:
        if {"state_pool", "slots"} <= parameters:
            return "decode"
        return "chunk" if parameters & {"chunk_size", "safe_gate"} else "recurrent"
    return "gate" if {"g", "A_log"} <= parameters else None


def _from_object(name: str, value: object, origin: str) -> Subject:
    """A subject from a Subject, a function with one of fla's signatures, what has such functions, or what makes one;
    `origin` is where it was found, `module:attribute`.
    """
    if isinstance(value, Subject):
        return value
    functions = {entry: getattr(value, attr, None) for attr, entry in ENTRY_OF_NAME.items()}
    functions = {entry: function for entry, function in functions.items() if callable(function)}
    if functions:
        names = {entry: attr for attr, entry in ENTRY_OF_NAME.items()}
        origins = {entry: f"{origin}{'.' if ':' in origin else ':'}{names[entry]}" for entry in functions}
        return signature_subject(name, functions, str(getattr(value, "__version__", "")), origins)
    if not callable(value):
        raise ValueError(f"subject is {name!r}, which has none of {', '.join(ENTRY_OF_NAME)}")
    entry = _entry_of(value)
    if entry:
        return signature_subject(name, {entry: value}, origins={entry: origin})
    required = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind <= 1]
    if required:
        raise ValueError(f"subject is {name!r}, a callable whose arguments are not those of {', '.join(ENTRY_OF_NAME)}")
    return _from_object(name, value(), f"{origin}()")


def load_subject(name: str | None = None) -> Subject:
    """The subject of this name; without one that of KDA_SUBJECT, else kda.

    `kda`, `fla`, a name registered under the entry point group `kda.subjects`, `module` or `module:attribute`.
    """
    name = name or os.environ.get("KDA_SUBJECT") or "kda"
    if name == "kda":
        return own_subject()
    if name == "fla":
        return fla_subject()
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _from_object(name, point.load(), point.value)
    module, _, attribute = name.partition(":")
    try:
        value: object = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        must = "kda, fla, a registered name or module[:attribute]"
        raise ValueError(f"subject is {name!r}; it must be {must} ({error})") from None
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            raise ValueError(f"subject is {name!r}, but {module} has no attribute {attribute}")
        value = getattr(value, part)
    return _from_object(name, value, name)


def known_subjects() -> Iterable[str]:
    return ("kda", "fla", *(point.name for point in metadata.entry_points(group=ENTRY_POINTS)))
