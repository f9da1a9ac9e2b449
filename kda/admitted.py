"""Authority on calls like earlier ones: what validation and the choice of a route go by, so that both happen once."""

from operator import itemgetter

from kda import registry
from kda.contract import DIFFERENTIABLE, Call

# NOTE [Calls like earlier ones]
# Whether a call is legal, and which route takes it, follows from its metadata and from `registry.conditions`. So a call
# that was admitted is known again by those, types included, since 1 == 1.0 == True, and validation and the routes are
# not asked a second time. What is refused is never kept: it goes the long way each time, and is told why. What only the
# data or the surroundings of a call show (`kda.contents`, `contract.check_transforms`) is checked in every call.

TENSORS = (*DIFFERENTIABLE, "cu_seqlens", "cu_seqlens_cpu")
MOST = 1024  # calls that are remembered; beyond, all are forgotten
_tensors = itemgetter(*TENSORS)
_numbers = itemgetter(*(name for name in Call.__dataclass_fields__ if name not in TENSORS))
_routes: dict[tuple, str] = {}


def key(call: Call) -> tuple | None:
    """What validation and the routes go by; None for what is no legal call anyway, or whose sizes are symbols."""
    arguments = call.__dict__
    try:
        metadata = [(x.dtype, x.shape, x.device, x.layout) for x in _tensors(arguments) if x is not None]
        made = (tuple(map(type, arguments.values())), _numbers(arguments), *metadata, registry.conditions())
        hash(made)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return made


def route(known: tuple | None) -> str | None:
    """The route of an admitted call with that key."""
    return _routes.get(known)


def keep(known: tuple | None, route: str) -> None:
    """Remember that calls with this key are legal, and the route that takes them."""
    if known is not None:
        if len(_routes) >= MOST:
            _routes.clear()
        _routes[known] = route
