"""Authority on fla as a subject: its public operators, release by release.

Source: https://github.com/fla-org/flash-linear-attention; on PyPI fla-core (0.4.2, 0.5.0, 0.5.2 and 0.6.0 were read).
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from harness.call import Route
from harness.foreign import both, signature_routes, taken
from harness.problem import Problem

V_FIRST, ITS_OLD_NAME = "state_v_first", "transpose_state_layout"  # until 0.5.0


def routes() -> tuple[Route, ...]:
    """Chunk, recurrent and gate; its recurrent kernel has no backward pass. ValueError where it is not installed."""
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.kda.gate import fused_kda_gate
    except Exception as error:  # whatever an import of kernels may raise: Triton has checks of its own
        raise ValueError(f"subject is 'fla', which cannot be imported: {error}") from None
    functions = {"chunk": chunk_kda, "recurrent": fused_recurrent_kda, "gate": fused_kda_gate}
    module = {"chunk": "fla.ops.kda", "recurrent": "fla.ops.kda", "gate": "fla.ops.kda.gate"}
    origins = {entry: f"{module[entry]}:{function.__name__}" for entry, function in functions.items()}
    made = signature_routes({entry: _with_new_names(function) for entry, function in functions.items()}, origins)
    return tuple(
        replace(route, lacks=both(route.lacks, _no_tokens), differentiable=route.entry != "recurrent") for route in made
    )


def _with_new_names(function: Callable) -> Callable:
    """A function of an older release with the name that an argument has by now."""
    names = taken(function)
    if names is None or V_FIRST in names or ITS_OLD_NAME not in names:
        return function

    @functools.wraps(function)
    def renamed(*, state_v_first: bool = False, **given: object) -> object:
        return function(**given, transpose_state_layout=state_v_first)

    renamed.taken = (names - {ITS_OLD_NAME}) | {V_FIRST}
    return renamed


def _no_tokens(problem: Problem) -> str | None:
    return None if problem.batch[1] else "T = 0 is outside what its kernels are launched for"
