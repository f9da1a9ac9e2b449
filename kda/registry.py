"""Authority on which implementation serves a call: the registry, its verifiers, forcing, forbidding, and `explain`."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton

from kda.contract import Call, GateCall
from kda.precision import PrecisionSpec

AnyCall = Call | GateCall

# The order in which routes are asked; the first that does not refuse serves the call.
ORDER = (
    *("gate", "decode", "segment_parallel-safe_gate", "segment_parallel-unbounded"),
    *("fused-safe_gate", "fused-unbounded"),
    *("chunk-safe_gate", "chunk-unbounded", "recurrent", "torch"),
)
INTERPRETED = triton.knobs.runtime.interpret  # fixed at import, as it is for every kernel


@dataclass(frozen=True)
class Route:
    """One implementation. `verify` returns why it cannot take a call, or None; it is cheap, has no side effects, and
    goes by the call's metadata and by `conditions` alone.

    `run(call)` is differentiable. `gradients(call, *grads)` computes every gradient, by the name of its argument, from
    the inputs and the gradients of the results (None where there is none): what a compiled backward pass runs. None on
    a route whose entries have no gradients. `invariant`: no bit depends on batch, packing, other heads or later tokens.
    """

    id: str
    entries: frozenset[str]  # of "chunk", "recurrent", "gate", "decode"
    summary: str
    verify: Callable[[AnyCall], str | None]
    run: Callable[[AnyCall], object]
    gradients: Callable[..., dict[str, torch.Tensor | None]] | None
    precision: PrecisionSpec
    invariant: bool = True


@dataclass(frozen=True)
class Explanation:
    """Which route a call takes, and why each one asked before it refused."""

    entry: str
    route: str | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.entry}: {self.route or 'no route takes this call'}"]
        return "\n".join(lines + [f"  {route}: refused, {reason}" for route, reason in self.reasons])


class NoRoute(ValueError):
    """Every route refuses a valid call; the message has the reason of each."""


_registry: dict[str, Route] = {}
_explaining: ContextVar[bool] = ContextVar("kda_explaining", default=False)
_forced: list[str] = []
_forbidden: list[str] = []


def register(route: Route) -> Route:
    if route.id not in ORDER:
        raise ValueError(f"route.id is {route.id!r}; it must be one of {', '.join(ORDER)}")
    _registry[route.id] = route
    return route


def register_chunk(
    precisions: Mapping[str, PrecisionSpec],
    summaries: Mapping[str, str],
    verify: Callable[..., str | None],
    run: Callable[..., object],
    gradients: Callable[..., dict[str, torch.Tensor | None]],
    invariant: bool = True,
) -> None:
    """A route of the chunk entry for each declaration; the functions take its id as `route`."""
    for route, precision in precisions.items():
        register(
            Route(
                id=route,
                entries=frozenset({"chunk"}),
                summary=summaries[route],
                verify=functools.partial(verify, route=route),
                run=functools.partial(run, route=route),
                gradients=functools.partial(gradients, route=route),
                precision=precision,
                invariant=invariant,
            )
        )


def routes() -> tuple[Route, ...]:
    """Every registered route, in the order in which they are asked."""
    return tuple(_registry[name] for name in ORDER if name in _registry)


def route_named(route_id: str) -> Route:
    return _registry[route_id]


def _known(route_id: str, where: str) -> str:
    if route_id not in _registry:
        raise ValueError(f"{where} is {route_id!r}; it must be one of {', '.join(route.id for route in routes())}")
    return route_id


@contextlib.contextmanager
def force_route(route_id: str) -> Iterator[None]:
    """Inside the block only this route may serve the entries that it has; a call that it refuses is an error."""
    _forced.append(_known(route_id, "route_id"))
    try:
        yield
    finally:
        _forced.pop()


@contextlib.contextmanager
def forbid_routes(*route_ids: str) -> Iterator[None]:
    """Inside the block these routes serve nothing."""
    _forbidden.extend([_known(route_id, "route_ids") for route_id in route_ids])
    try:
        yield
    finally:
        del _forbidden[len(_forbidden) - len(route_ids) :]


def forced_route() -> str | None:
    """The route that a block or KDA_FORCE_ROUTE forces now, or None."""
    name = _asked_for()
    return _known(name, "KDA_FORCE_ROUTE") if name else None


def _asked_for() -> str | None:
    """The route that is forced, known or not."""
    return _forced[-1] if _forced else os.environ.get("KDA_FORCE_ROUTE")


def _forbidden_routes() -> set[str]:
    named = [name.strip() for name in os.environ.get("KDA_FORBID_ROUTES", "").split(",") if name.strip()]
    return set(_forbidden) | {_known(name, "KDA_FORBID_ROUTES") for name in named}


def conditions() -> tuple[object, ...]:
    """What `choose` goes by beside the call."""
    return INTERPRETED, _asked_for(), *_forbidden, os.environ.get("KDA_FORBID_ROUTES")


def needs_kernels(*tensors: torch.Tensor | None) -> str | None:
    """Why Triton kernels, which compute in fp32, cannot take these tensors of one device, or None."""
    present = [x for x in tensors if x is not None]
    if any(x.dtype == torch.float64 for x in present):
        return "computes in fp32, not float64"
    device = present[0].device
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    return f"Triton kernels need GPU tensors (these are on {device}), or TRITON_INTERPRET=1 set before kda is imported"


def choose(call: AnyCall) -> Explanation:
    """Ask the routes in order."""
    forced, forbidden, reasons = forced_route(), _forbidden_routes(), []
    if forced and call.entry not in _registry[forced].entries:
        forced = None
    for route in routes():
        if call.entry not in route.entries:
            continue
        if forced and route.id != forced:
            reason = f"{forced} is forced"
        elif route.id in forbidden:
            reason = "forbidden"
        else:
            reason = route.verify(call)
        if reason is None:
            return Explanation(call.entry, route.id, tuple(reasons))
        reasons.append((route.id, reason))
    return Explanation(call.entry, None, tuple(reasons))


def asked_to_explain() -> bool:
    return _explaining.get()


class Explained(Exception):
    """Carries the answer out of an entry point that was asked only to explain itself."""

    def __init__(self, explanation: Explanation):
        self.explanation = explanation


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Inside the block `ops.dispatch` raises `Explained` instead of running anything."""
    token = _explaining.set(True)
    try:
        yield
    finally:
        _explaining.reset(token)
