"""Authority on answering "which route would this call take, and why not the others?" without running it."""

from collections.abc import Callable

from kda import registry
from kda.chunk import chunk_kda
from kda.decode import kda_decode
from kda.fused_recurrent import fused_recurrent_kda
from kda.gate import fused_kda_gate
from kda.registry import Explanation

ENTRY_POINTS = (chunk_kda, fused_recurrent_kda, fused_kda_gate, kda_decode)
ENTRIES: dict[str, Callable] = {entry.__name__: entry for entry in ENTRY_POINTS}


def explain(entry: Callable | str, *args: object, **kwargs: object) -> Explanation:
    """The route that `entry(*args, **kwargs)` would take and the reasons of those that refused; nothing is launched.

    `entry` is one of chunk_kda, fused_recurrent_kda, fused_kda_gate, kda_decode, or its name. A call outside the
    contract raises as it would.
    """
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", repr(entry))
    if name not in ENTRIES:
        raise ValueError(f"entry is {name!r}; it must be one of {', '.join(ENTRIES)}")
    with registry.explaining():
        try:
            ENTRIES[name](*args, **kwargs)
        except registry.Explained as answer:
            return answer.explanation
    raise AssertionError(f"{name} returned without asking for a route")
