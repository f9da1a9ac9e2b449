"""Authority on implementations under test: how each is found by name, what it can do, and what it may round."""

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import metadata

from torch import Tensor

from harness import checkout, fitting
from harness.adapters import PEERS, Adapter, adapter_route
from harness.call import DIFFERENTIABLE, Route, call, keywords
from harness.foreign import ENTRY_OF_NAME, both, entry_of, signature_routes
from harness.problem import Case, Problem
from harness.serving import Served

__all__ = ["DIFFERENTIABLE", "Route", "Subject", "keywords", "known_subjects", "load_subject", "own_subject"]

ENTRY_POINTS = "kda.subjects"
# What the kernels of the fused routes are asked in pieces too: whatever a state brings from one to the next.
IN_PIECES = ("generic", "ragged", "gate_bound", "spikes_resets", "repeated_keys", "slow_decay", "long_decay", "models")


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
    from kda.backends.torch_backend import ROUTE as TORCH
    from kda.chunk_fwd import anchored
    from kda.decode import PRECISION as DECODE_PRECISION
    from kda.fused_segments import segment_tokens
    from kda.gate import PRECISION as GATE_PRECISION

    def proving(route_id: str) -> Callable[[], AbstractContextManager]:
        @contextlib.contextmanager
        def forced_and_recorded():
            with kda.force_route(route_id), kda.record_launches() as launches:
                yield launches

        return forced_and_recorded

    def piece(problem: Problem) -> int:
        rows = sum(problem.lengths) + problem.tail
        return segment_tokens(rows, problem.heads * problem.group, problem.K, problem.V)

    functions = {"chunk": kda.chunk_kda, "recurrent": kda.fused_recurrent_kda, "gate": kda.fused_kda_gate}
    specs = {"gate": GATE_PRECISION, "decode": DECODE_PRECISION}
    routes = []
    for route in kda.routes():
        for entry in sorted(route.entries):
            spec = specs.get(entry, route.precision)
            bounded = _wants_bounded if anchored(route.id) else _takes_all
            segmented = route.precision.segment is not None
            lacks = both(fitting.lacks_fused, bounded) if route.id.startswith("fused") or segmented else bounded
            shown = {"context": proving(route.id), "invariant": route.invariant}
            shown |= {"segment": piece, "families": IN_PIECES} if segmented else {}
            if entry == "decode":
                shown |= {"origin": "kda:kda_decode", "differentiable": False}
                routes.append(Route(route.id, entry, Served(kda.kda_decode), spec, **shown))
                continue
            function, origin = functions[entry], f"kda:{functions[entry].__name__}"
            made = Route(route.id, entry, function, spec, lacks, origin=origin, **shown)
            without = entry == "gate" or route.id == TORCH
            routes.append(made if without else replace(made, stages=_shown(made)))
    return Subject("kda", _version("kda-harness"), tuple(routes), foreign=False)


def _shown(route: Route) -> Callable[[Case], dict[str, Tensor]]:
    """The intermediates of a call of one of kda's own routes, as the very call leaves them."""
    from kda import trace
    from kda.chunk_stages import in_layout

    def stages(case: Case) -> dict[str, Tensor]:
        with trace.traced() as found:
            call(route, case)
        return in_layout(found, case.options.state_v_first)

    return stages


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def _takes_all(problem: Problem) -> None:
    return None


def _wants_bounded(problem: Problem) -> str | None:
    known = problem.safe_gate or (problem.lower_bound is not None and problem.bounded)
    return None if known else "takes gates known to be in [-5, 0]: safe_gate or such a lower_bound"


def signature_subject(
    name: str, functions: Mapping[str, Callable], version: str = "", origins: Mapping[str, str] | None = None
) -> Subject:
    """A subject from callables with fla's signatures, by entry; see `harness.foreign.signature_routes`."""
    return Subject(name, version, signature_routes(functions, origins))


def _from_object(name: str, value: object, origin: str) -> Subject:
    """A subject from a Subject, an Adapter or several, a function with one of fla's signatures, what has such
    functions, or what makes one; `origin` is where it was found, `module:attribute`.
    """
    if isinstance(value, Subject):
        return value
    if isinstance(value, Adapter):
        return Subject(name, "", (adapter_route(value, origin),))
    if isinstance(value, tuple | list) and value and all(isinstance(one, Adapter) for one in value):
        return Subject(name, "", tuple(adapter_route(one, f"{origin}[{i}]") for i, one in enumerate(value)))
    functions = {entry: getattr(value, attr, None) for attr, entry in ENTRY_OF_NAME.items()}
    functions = {entry: function for entry, function in functions.items() if callable(function)}
    if functions:
        names = {entry: attr for attr, entry in ENTRY_OF_NAME.items()}
        origins = {entry: f"{origin}{'.' if ':' in origin else ':'}{names[entry]}" for entry in functions}
        return signature_subject(name, functions, str(getattr(value, "__version__", "")), origins)
    if not callable(value):
        raise ValueError(f"subject is {name!r}, which has none of {', '.join(ENTRY_OF_NAME)}")
    entry = entry_of(value)
    if entry:
        return signature_subject(name, {entry: value}, origins={entry: origin})
    required = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind <= 1]
    if required:
        raise ValueError(f"subject is {name!r}, a callable whose arguments are not those of {', '.join(ENTRY_OF_NAME)}")
    return _from_object(name, value(), f"{origin}()")


def peer_subject(name: str) -> Subject:
    """A known implementation; ValueError where it is not installed."""
    peer = PEERS[name]
    return Subject(name, _version(peer.distribution), peer.routes())


def load_subject(name: str | None = None) -> Subject:
    """The subject of this name; without one that of KDA_SUBJECT, else kda.

    `kda`, a peer (`harness.adapters.PEERS`), a name registered under the entry point group `kda.subjects`, `module` or
    `module:attribute`; each but kda with `@FOLDER` behind it to be imported from there. ValueError for anything else.
    """
    name = name or os.environ.get("KDA_SUBJECT") or "kda"
    bare, folder = checkout.split(name)
    if folder is None:
        return _named(name)
    package = bare.partition(":")[0].partition(".")[0]
    package, distribution = (PEERS[bare].package, PEERS[bare].distribution) if bare in PEERS else (package, package)
    checkout.prefer(folder, package)
    return replace(_named(bare), name=f"{bare}@{folder}", version=checkout.version(folder, distribution))


def _named(name: str) -> Subject:
    if name == "kda":
        return own_subject()
    if name in PEERS:
        return peer_subject(name)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _from_object(name, point.load(), point.value)
    module, _, attribute = name.partition(":")
    try:
        value: object = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        must = f"kda, {', '.join(PEERS)}, a registered name or module[:attribute]"
        raise ValueError(f"subject is {name!r}; it must be {must} ({error})") from None
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            raise ValueError(f"subject is {name!r}, but {module} has no attribute {attribute}")
        value = getattr(value, part)
    return _from_object(name, value, name)


def known_subjects() -> Iterable[str]:
    return ("kda", *PEERS, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS)))
