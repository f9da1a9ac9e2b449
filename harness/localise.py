"""Authority on where a quantity is wrong and how the wrong values relate to the right ones, in words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.field import Field
from harness.problem import Problem
from harness.rows import BY_TOKEN, PER_QUERY_HEAD
from oracle.stages import BLOCK

LISTED = 6  # values of an axis that are written out one by one
MOST = 0.8  # share of the wrong elements that a relation must explain
NAMED_FACTORS = {
    **{"0": 0.0, "1/2": 0.5, "2": 2.0, "-1": -1.0, "1/4": 0.25, "4": 4.0, "-1/2": -0.5, "-2": -2.0},
    **{"1/3": 1 / 3, "3": 3.0, "2/3": 2 / 3, "3/2": 1.5, "ln 2": math.log(2), "log2 e": math.log2(math.e)},
}


@dataclass(frozen=True)
class Location:
    """The wrong elements of a quantity.

    `counts`: axis -> value -> (wrong, all) elements; `first`: the caller's index of the first wrong one and, by axis,
    where that is; `alone`: whether single elements are over their tolerance, or only many of them together (then the
    wrong ones are those with the largest errors).
    """

    elements: int
    wrong: int
    nonfinite: int
    alone: bool
    counts: Mapping[str, Mapping[int, tuple[int, int]]]
    first: tuple[int, ...]
    first_at: Mapping[str, int]
    where: str
    relation: str


def locate(field: Field, problem: Problem) -> Location | None:
    """Where `field` is wrong, or None where it is right everywhere."""
    ratio, alone = field.ratio, bool(field.wrong.any())
    if not alone and not float(ratio.max() if ratio.numel() else 0.0) > 0:
        return None
    wrong = field.wrong if alone else ratio >= ratio.max() / 2
    axes = coordinates(field.quantity, tuple(field.expected.shape), problem)
    counts = {name: _counted(x, wrong) for name, x in axes.items()}
    if "sequence" in counts:  # the empty ones too
        counts["sequence"] = dict.fromkeys(range(len(problem.lengths)), (0, 0)) | counts["sequence"]
    place = tuple(wrong.nonzero()[0].tolist())
    return Location(
        elements=wrong.numel(),
        wrong=int(wrong.sum()),
        nonfinite=int((~torch.isfinite(field.got)).sum()),
        alone=alone,
        counts=counts,
        first=place,
        first_at={name: int(x[place]) for name, x in axes.items()},
        where=_where(counts),
        relation=relation(field, wrong, axes, problem),
    )


def coordinates(quantity: str, shape: tuple[int, ...], problem: Problem) -> dict[str, Tensor]:
    """For every element of a quantity its place on each axis that an author thinks in; -1 outside of sequences."""
    grid = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    head = "query head" if quantity in PER_QUERY_HEAD else "value head"
    if quantity in BY_TOKEN or quantity == "dbeta":
        sequence, token = _tokens(problem)
        row = grid[0] * shape[1] + grid[1]
        axes = {"sequence": sequence[row], "token": token[row]}
        axes |= {"chunk": _divided(token[row], problem.chunk_size), "block of 16": _divided(token[row], BLOCK)}
        axes |= {head: grid[2]} | ({"channel": grid[3]} if len(shape) == 4 else {})
    elif quantity in ("ht", "dh0"):
        axes = {"sequence": grid[0], head: grid[1], **_state_axes(grid, problem)}
    elif quantity == "h":
        axes = {"batch": grid[0], "chunk": grid[1], head: grid[2], **_state_axes(grid, problem)}
    elif quantity == "ddt_bias":
        axes = {head: grid[0] // problem.K, "channel": grid[0] % problem.K}
    else:
        axes = {head: grid[0]}
    return axes


def _state_axes(grid: tuple[Tensor, ...], problem: Problem) -> dict[str, Tensor]:
    names = ("v channel", "k channel") if problem.v_first else ("k channel", "v channel")
    return dict(zip(names, grid[-2:]))


def _tokens(problem: Problem) -> tuple[Tensor, Tensor]:
    """(sequence, position in it) of each row of the flattened batch."""
    sequence, token = torch.full((2, math.prod(problem.batch)), -1)
    row = 0
    for n, length in enumerate(problem.lengths):
        sequence[row : row + length], token[row : row + length] = n, torch.arange(length)
        row += length
    return sequence, token


def _divided(token: Tensor, size: int) -> Tensor:
    return torch.where(token < 0, -1, token // size)


def _counted(axis: Tensor, wrong: Tensor) -> dict[int, tuple[int, int]]:
    offset = int(axis.min())
    every = torch.bincount((axis - offset).flatten())
    bad = torch.bincount((axis - offset)[wrong], minlength=len(every))
    pairs = zip(range(offset, offset + len(every)), bad.tolist(), every.tolist())
    return {value: (b, n) for value, b, n in pairs if n}


def _where(counts: Mapping[str, Mapping[int, tuple[int, int]]]) -> str:
    """The axes on which only some places are wrong; chunks and blocks where the tokens alone say little."""
    parts = {}
    for axis, values in counts.items():
        bad = [value for value, (wrong, _) in values.items() if wrong]
        every = [value for value in values if value >= 0 or value in bad]
        if len(every) > 1 and len(bad) < len(every):
            parts[axis] = f"{_plural(axis, len(bad))} {said(bad, every)} of {len(every)}"
    scattered = "between" in parts.get("token", "") or "all but" in parts.get("token", "")
    left_out = ("token",) if scattered else ("chunk", "block of 16") if "token" in parts else ()
    return "; ".join(text for axis, text in parts.items() if axis not in left_out) or "everywhere"


def _plural(axis: str, count: int) -> str:
    irregular = {"batch": "batches", "block of 16": "blocks of 16"}
    return axis if count == 1 else irregular.get(axis, f"{axis}s")


def said(values: list[int], every: list[int]) -> str:
    """A set of places in words: a range, a step, a list, or all but a few."""
    if values == every:
        return "all"
    if -1 in values:
        rest = [value for value in values if value >= 0]
        return "outside every sequence" + (f", and {said(rest, every)}" if rest else "")
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    step = values[1] - values[0] if len(values) > 2 else 0
    if step and values == list(range(values[0], values[-1] + 1, step)):
        return f"{values[0]}, {values[1]}, .. {values[-1]} (every {step})"
    if len(values) <= LISTED:
        return ", ".join(map(str, values))
    missing = sorted(set(every) - set(values))
    if len(missing) <= LISTED:
        return f"all but {', '.join(map(str, missing))}"
    return f"{len(values)} between {values[0]} and {values[-1]}"


def relation(field: Field, wrong: Tensor, axes: Mapping[str, Tensor], problem: Problem) -> str:
    """What most of the wrong values are, compared with the right ones."""
    got, expected, tolerance = field.got[wrong], field.expected[wrong], field.tolerance[wrong].nan_to_num(nan=0.0)
    count = got.numel()
    lost = ~torch.isfinite(got)
    if int(lost.sum()) >= MOST * count:
        return f"{int(torch.isnan(got).sum())} NaN and {int(torch.isinf(got).sum())} infinite of {count}"
    for words, candidate, informative in _candidates(field, wrong, axes, problem):
        close = ((got - candidate).abs() <= tolerance) & informative
        if int(informative.sum()) >= MOST * count and int(close.sum()) >= MOST * count:
            return f"{words}, at {int(close.sum())} of {count}"
    ratios = (got / expected)[(expected.abs() > 4 * tolerance) & ~lost]
    if not ratios.numel():
        return "what should have come is 0, or too small to compare with"
    return f"no simple relation: got / expected {_span(ratios)}"


def _span(ratios: Tensor) -> str:
    low, middle, high = (f"{float(torch.quantile(ratios[:100_000], share)):.3g}" for share in (0.0, 0.5, 1.0))
    return f"is {low}" if low == high else f"from {low} to {high}, median {middle}"


def _candidates(
    field: Field, wrong: Tensor, axes: Mapping[str, Tensor], problem: Problem
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(words, value, where the value differs enough from the right one to say something), simplest first."""
    got, expected, tolerance = field.got[wrong], field.expected[wrong], field.tolerance[wrong].nan_to_num(nan=0.0)
    scale = problem.K**-0.5 if problem.scale is None else problem.scale
    for name, factor in (NAMED_FACTORS | {"scale": scale, "1 / scale": 1 / scale if scale else 0.0}).items():
        value = factor * expected
        words = f"got is {name} of expected" if factor else "got is 0"
        yield words, value, (expected.abs() > 4 * tolerance) & ((value - expected).abs() > 4 * tolerance)
    for words, whole in _neighbours(field.expected, axes):
        value = whole[wrong]
        yield f"got is {words}", value, (value - expected).abs() > 4 * tolerance
    finite = torch.isfinite(got)
    power = float((expected[finite] ** 2).sum())
    if power > 0 and got.numel() > 2:
        gain = float((got[finite] * expected[finite]).sum()) / power
        yield f"got is {gain:.6g} times expected", gain * expected, torch.ones_like(finite)
    if got.numel() > 2:
        yield f"got is {float(got[0]):.6g} everywhere", got[:1].expand_as(got), torch.ones_like(finite)


def _neighbours(expected: Tensor, axes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The right values of other places: one step along every axis of the tensor, and a square state transposed."""
    names = {1: "token", 2: "head", 3: "channel"} if "token" in axes else {0: "sequence", 1: "head"}
    for dim, name in names.items():
        if dim < expected.dim() and expected.shape[dim] > 1:
            yield f"that of the {name} before", expected.roll(1, dim)
            yield f"that of the {name} after", expected.roll(-1, dim)
    if "k channel" in axes and expected.shape[-1] == expected.shape[-2] > 1:
        yield "that of the transposed state", expected.mT
