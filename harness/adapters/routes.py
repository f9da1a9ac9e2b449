"""Authority on the route of a declared kernel: how it is called, judged, refused and aimed at."""

from harness.adapters.declare import Adapter
from harness.adapters.domain import lacks, limits
from harness.adapters.nearest import nearest
from harness.adapters.translate import Adapted
from harness.call import Route
from harness.serving import Served


def adapter_route(adapter: Adapter, origin: str = "") -> Route:
    """The route of a declaration. `origin`: where that is, `module:attribute`.

    ValueError where the function cannot be had, or does not have the arguments declared.
    """
    adapted = Adapted(adapter)
    _ = adapter.implementation  # now, and not at the first problem
    decode = adapter.entry == "decode"
    return Route(
        adapter.id,
        adapter.entry,
        Served(adapted) if decode else adapted,
        adapter.precision,
        lacks(adapter),
        differentiable=adapter.differentiable and not decode,
        origin=f"{origin}.call" if origin else "",
        nearest=nearest(adapter),
        limits=limits(adapter),
    )
