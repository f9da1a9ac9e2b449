"""Authority on the order in which the interpreter runs the programs of a grid."""

import contextlib
import math
import random
from collections.abc import Iterator

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

_random: random.Random | None = None


@contextlib.contextmanager
def shuffle(seed: int) -> Iterator[None]:
    """Inside the block programs run in a random order, the same one for the same seed: a GPU promises none."""
    global _random
    before, _random = _random, random.Random(seed)
    try:
        yield
    finally:
        _random = before


def hook() -> None:
    """Give each launch an order: its n-th program is then the one in the n-th place of that order."""
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    order: list[int] | None = None

    def set_grid_dim(self, *shape: int) -> None:
        nonlocal order
        set_dim(self, *shape)
        programs = range(math.prod(shape))
        order = None if _random is None else _random.sample(programs, len(programs))

    def set_grid_idx(self, *index: int) -> None:
        if order is not None:
            place = int(np.ravel_multi_index(index, self.grid_dim))
            index = tuple(map(int, np.unravel_index(order[place], self.grid_dim)))
        set_index(self, *index)

    InterpreterBuilder.set_grid_dim = set_grid_dim
    InterpreterBuilder.set_grid_idx = set_grid_idx
