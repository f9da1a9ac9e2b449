"""Authority on what a failure needs: each flag flipped alone, each length, size and count one more and one less."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace

from harness.problem import FLAGS, LOSSES, Problem

Fails = Callable[[Problem], bool | None]
SIMPLEST = {
    "gate_dtype": "fp32",
    "dtype": "fp32",
    "scale": None,
    "A_log": None,
    "dt_bias": None,
    "offsets": "int64",
    "precision": "ieee",
}
LISTED = 6
RANDOM = ("gauss", "unit", "mild", "uniform")  # patterns whose values mean nothing in particular


@dataclass(frozen=True)
class Trial:
    """One change to the problem, in words, and whether it still failed."""

    change: str
    fails: bool


def trials(problem: Problem, fails: Fails, seconds: float) -> list[Trial]:
    """Every single change in turn, the most telling first, until the time is up.

    `fails` says None where the changed problem cannot be compared: not covered, or without the failing quantity.
    """
    deadline, found, tried = time.monotonic() + seconds, [], {problem}
    for words, changes in _changes(problem):
        if time.monotonic() >= deadline:
            break
        try:
            candidate = replace(problem, **changes)
        except ValueError:  # no legal problem
            continue
        if candidate not in tried:
            tried.add(candidate)
            failed = fails(candidate)
            found += [] if failed is None else [Trial(words, failed)]
    return found


def _changes(problem: Problem) -> Iterator[tuple[str, Mapping[str, object]]]:
    yield from _lengths(problem)
    for flag in FLAGS:
        yield _flipped(problem, flag)
    defaults = {field.name: field.default for field in fields(Problem) if field.default is not MISSING}
    for name in ("heads", "group", "K", "V"):
        for size in (getattr(problem, name) - 1, getattr(problem, name) + 1):
            yield f"{name}={size}", {name: size, "edits": _inside(problem, name, size)}
    for name, simplest in SIMPLEST.items():
        yield f"{name}={simplest}", {name: simplest}
    if problem.gate != "pregated":
        yield "gate=pregated", {**dict.fromkeys(("lower_bound", "A_log", "dt_bias")), "gate": "pregated", "g": "mild"}
    yield f"chunk_size={96 - problem.chunk_size}", {"chunk_size": 96 - problem.chunk_size}
    if problem.tail:
        yield "tail=0", {"tail": 0}
    for loss in LOSSES:
        yield f"loss={loss}", {"loss": loss}
    for name, menu in problem.menus().items():
        current = getattr(problem, name)
        if current is not None and not any(edit.tensor == name for edit in problem.edits):
            plain = defaults[name] if defaults[name] in menu and defaults[name] != current else None
            other = plain or next((pattern for pattern in RANDOM if pattern in menu and pattern != current), None)
            if other:
                yield f"{name}={other}", {name: other}


def _lengths(problem: Problem) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Edits past the end of a shorter batch go with it; those behind a changed sequence keep their rows."""
    if not problem.packed:
        for length in (problem.lengths[0] - 1, problem.lengths[0] + 1):
            if length >= 0:
                lengths = (length,) * len(problem.lengths)
                yield f"length={length}", {"lengths": lengths, "edits": _moved(problem, lengths)}
        if len(problem.lengths) > 1:
            lengths = problem.lengths[:-1]
            yield f"batch={len(lengths)}", {"lengths": lengths, "edits": _moved(problem, lengths)}
        return
    if len(problem.lengths) > 1:
        lengths = problem.lengths[:-1]
        yield "one sequence less (the last)", {"lengths": lengths, "edits": _moved(problem, lengths)}
        if not problem.edits:
            yield "one sequence less (the first)", {"lengths": problem.lengths[1:]}
    for n, length in enumerate(problem.lengths):
        for other in (length - 1, length + 1):
            if other >= 0:
                lengths = (*problem.lengths[:n], other, *problem.lengths[n + 1 :])
                yield f"lengths[{n}]={other}", {"lengths": lengths, "edits": _moved(problem, lengths)}


def _flipped(problem: Problem, flag: str) -> tuple[str, Mapping[str, object]]:
    on = not getattr(problem, flag)
    changes: dict[str, object] = {flag: on}
    if flag == "packed" and not on:
        changes["tail"] = 0
    if flag == "beta_sigmoid":
        changes |= {"beta": "zeros" if on else "half", "neg_eigval": False}
    if flag == "neg_eigval" and on:
        changes |= {"beta_sigmoid": True, "beta": problem.beta if problem.beta_sigmoid else "zeros"}
    return f"{flag}={on}", changes


def _moved(problem: Problem, lengths: tuple[int, ...]) -> tuple:
    """The edits at the same places of the same sequences after the lengths have changed."""
    starts, moved = [0], []
    for length in problem.lengths:
        starts.append(starts[-1] + length)
    for edit in problem.edits:
        if edit.tensor in ("A_log", "dt_bias"):
            moved.append(edit)
            continue
        if edit.tensor in ("h0", "dht"):
            moved += [edit] if edit.index[0] < len(lengths) else []
            continue
        row = edit.index[0]
        n = next((i for i in range(len(lengths)) if starts[i] <= row < starts[i] + problem.lengths[i]), None)
        if n is not None and row - starts[n] < lengths[n]:
            moved.append(replace(edit, index=(sum(lengths[:n]) + row - starts[n], *edit.index[1:])))
    return tuple(moved)


def _inside(problem: Problem, name: str, size: int) -> tuple:
    """The edits that a problem with another K, V or number of heads still has room for."""
    if size < 1:
        return ()
    shapes = replace(problem, edits=(), **{name: size})
    room = lambda edit: all(i < n for i, n in zip(edit.index, shapes.shape(edit.tensor)))  # noqa: E731
    return tuple(edit for edit in problem.edits if room(edit))


def summary(found: list[Trial]) -> str:
    """What the failure needs, in one sentence: the single changes without which it is gone."""
    if not found:
        return "no changes tried"
    cured = [trial.change for trial in found if not trial.fails]
    rest = len(found) - len(cured)
    if not cured:
        return f"none of {rest} single changes makes it right"
    more = f" and {len(cured) - LISTED} more" if len(cured) > LISTED else ""
    wrong = f"; still wrong with each of {rest} other single changes" if rest else ""
    return f"right with {', '.join(cured[:LISTED])}{more}{wrong}"
