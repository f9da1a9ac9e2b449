"""Authority on the order in which the interpreter runs the programs of a grid."""

import builtins
import contextlib
import random
import types
from collections.abc import Iterator

import triton.runtime.interpreter as stock

_order: random.Random | None = None


@contextlib.contextmanager
def shuffle(seed: int) -> Iterator[None]:
    """Inside the block programs run in a random order, the same one for the same seed: a GPU promises none."""
    global _order
    before, _order = _order, random.Random(seed)
    try:
        yield
    finally:
        _order = before


def _grid_range(*bounds: int):
    values = builtins.range(*bounds)
    if _order is None:
        return values
    shuffled = list(values)
    _order.shuffle(shuffled)
    return shuffled


def hook() -> None:
    """The loops over the grid are the only ones in GridExecutor.__call__: it is rebound to a `range` that can shuffle."""
    launch = stock.GridExecutor.__call__
    scope = dict(launch.__globals__)
    scope["range"] = _grid_range
    rebound = types.FunctionType(launch.__code__, scope, launch.__name__, launch.__defaults__, launch.__closure__)
    rebound.__kwdefaults__ = launch.__kwdefaults__
    stock.GridExecutor.__call__ = rebound
