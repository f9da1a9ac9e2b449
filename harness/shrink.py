"""Authority on making a failing problem smaller: fields go to simpler values, as long as the same quantity fails in
the same class.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from harness.problem import Problem

_FLAGS = ("v_first", "intermediates", "neg_eigval", "beta_sigmoid", "l2norm", "initial_state", "safe_gate")
_LOSSES = ("none", "o", "state", "both")  # the simplest first
_COMPILE_KEY = ("heads", "group", "K", "V", "dtype", "gate_dtype", "chunk_size")


class Attempts:
    """A predicate that is asked so many times and then says no: a search with it ends at the same problem on any
    machine, as long as its time does not run out before.
    """

    def __init__(self, fails: Callable[[Problem], bool], most: int):
        self.fails, self.left = fails, most

    def __call__(self, problem: Problem) -> bool:
        self.left -= 1
        return self.left >= 0 and self.fails(problem)


def shrink(
    problem: Problem, still_fails: Callable[[Problem], bool], seconds: float, keep_shape: bool = False
) -> Problem:
    """The smallest problem found within `seconds`; deterministic apart from where the time runs out.

    With `keep_shape` what a kernel is compiled for stays as it is.
    """
    key = lambda p: tuple(getattr(p, name) for name in _COMPILE_KEY)  # noqa: E731
    deadline = time.monotonic() + seconds
    tried: set[Problem] = {problem}
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in _simpler(problem):
            if time.monotonic() >= deadline:
                break
            if candidate in tried or (keep_shape and key(candidate) != key(problem)):
                continue
            tried.add(candidate)
            if still_fails(candidate):
                problem, progress = candidate, True
                break
    return problem


def _simpler(problem: Problem) -> Iterator[Problem]:
    """Legal problems that are simpler by one step, boldest first."""
    for changes in _changes(problem):
        try:
            candidate = replace(problem, **changes)
        except ValueError:  # no legal problem
            continue
        if candidate != problem:
            yield candidate


def _changes(problem: Problem) -> Iterator[dict[str, object]]:
    yield from _fewer_tokens(problem)
    for name in ("heads", "group"):
        yield from ({name: smaller} for smaller in (1, getattr(problem, name) // 2, getattr(problem, name) - 1))
    for name in ("K", "V"):
        yield from ({name: smaller} for smaller in (1, 2, 4, 8, 16, 32, 64) if smaller < getattr(problem, name))
        yield {name: getattr(problem, name) - 1}
    yield {"tail": 0}
    yield {"packed": False, "tail": 0}
    for flag in _FLAGS:
        yield {flag: False}
    if problem.beta_sigmoid:
        yield {"beta_sigmoid": False, "neg_eigval": False, "beta": "ones"}
    for plain in ("zeros", "mild") if problem.gate != "pregated" else ():
        yield {"gate": "pregated", "lower_bound": None, "A_log": None, "dt_bias": None, "g": plain}
    yield {"A_log": None}
    yield {"dt_bias": None}
    for loss in _LOSSES[: _LOSSES.index(problem.loss)]:
        yield {"loss": loss}
    for name in ("dtype", "gate_dtype"):
        yield {name: "fp32"}
    yield {"precision": "ieee"}
    yield {"scale": None}
    yield {"rejected": 0}
    yield {"step": 1}
    yield {"state_dtype": "fp32"}
    yield {"seed": 0}
    yield from _plainer_patterns(problem)
    for index in range(len(problem.edits)):
        yield {"edits": problem.edits[:index] + problem.edits[index + 1 :]}


def _fewer_tokens(problem: Problem) -> Iterator[dict[str, object]]:
    lengths = problem.lengths
    if len(lengths) > 1:
        yield {"lengths": lengths[: len(lengths) // 2]}
        yield {"lengths": lengths[len(lengths) // 2 :]}
        for index in range(len(lengths)):
            yield {"lengths": lengths[:index] + lengths[index + 1 :]}
    places = range(len(lengths)) if problem.packed else (None,)
    for place in places:
        length = lengths[place or 0]
        for smaller in (1, length // 2, length - length // 4, length - 8, length - 1):
            if 0 <= smaller < length:
                if place is None:
                    yield {"lengths": (smaller,) * len(lengths)}
                else:
                    yield {"lengths": (*lengths[:place], smaller, *lengths[place + 1 :])}


def _plainer_patterns(problem: Problem) -> Iterator[dict[str, object]]:
    menus = problem.menus()
    names = [field.name for field in fields(problem) if field.name in menus]
    for name in names:
        current = getattr(problem, name)
        if current is None:
            continue
        menu = list(menus[name])
        for plainer in menu[: menu.index(current)]:
            yield {name: plainer}
