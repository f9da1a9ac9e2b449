"""Authority on what one wrong answer looks like: how far, how much and where, in terms that no size changes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.field import Field
from harness.localise import coordinates
from harness.problem import Problem
from oracle.stages import BLOCK

# Places that the elements of a quantity may be in, one digit for each; see `_places`.
PLACES = (
    *("outside", "first token", "last token", "first chunk", "later chunks", "chunk start", "last chunk"),
    *("block start", "later blocks", "first sequence", "later sequences", "first head", "later heads"),
    *("first of group", "rest of group", "first channel", "upper channels", "diagonal"),
)
NINTHS = 9  # shares are told in ninths: 0 only where nothing, 9 only where all
NO_PLACE = "-"
FARTHEST, NEAREST = 9.0, -9.0  # decades that are told apart


@dataclass(frozen=True)
class Cell:
    """A failing quantity of one probe.

    `far`: decades beyond the limit; `size`: decades of the wrong elements' error over their own size; `gain`: of what
    came over what should have come, by least squares; `lost`: ninths of the wrong that are not finite; `places`: a
    digit, the wrong ninths, for each of `PLACES`, - for one that has no element.
    """

    far: float
    size: float
    gain: float
    lost: int
    places: str

    def __post_init__(self):
        if len(self.places) != len(PLACES) or set(self.places) - set(f"{NO_PLACE}0123456789"):
            raise ValueError(f"Cell.places is {self.places!r}; it must be {len(PLACES)} digits or {NO_PLACE}")

    def __str__(self) -> str:
        return f"{self.far:.1f} {self.size:.1f} {self.gain:.2f} {self.lost} {self.places}"

    @classmethod
    def parsed(cls, text: str) -> "Cell":
        """Of what `str` has written; ValueError for anything else."""
        parts = text.split(" ")
        if len(parts) != 5:
            raise ValueError(f"a cell is {text!r}; it must be far, size, gain, lost and places")
        numbers = [float(part) for part in parts[:3]]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"a cell is {text!r}; its numbers must be finite")
        return cls(*numbers, int(parts[3]), parts[4])


def cell_of(field: Field, ratio: float, problem: Problem) -> Cell:
    """What a failing field looks like; `ratio` is that of its verdict."""
    far = field.ratio
    wrong = field.wrong
    if not bool(wrong.any()):  # only together are they out
        wrong = far >= far.max() / 2 if far.numel() else wrong
    got, expected = field.got[wrong], field.expected[wrong]
    finite = torch.isfinite(got) & torch.isfinite(expected)
    lost = _ninths(int((~finite).sum()), max(1, got.numel()))
    got, expected = got[finite], expected[finite]
    error, power = float((got - expected).square().sum()), float(expected.square().sum())
    gain = float((got * expected).sum()) / power if power > 0 else 1.0
    places = _shares(wrong, field.quantity, problem)
    made = Cell(_decades(ratio), _decades(math.sqrt(error / power) if power > 0 else math.inf), 0.0, lost, places)
    return Cell.parsed(str(Cell(made.far, made.size, min(9.0, max(-9.0, gain)), lost, places)))


def _decades(x: float) -> float:
    if not x < math.inf:
        return FARTHEST
    return min(FARTHEST, max(NEAREST, math.log10(x))) if x > 0 else NEAREST


def _ninths(part: int, whole: int) -> int:
    if part in (0, whole):
        return NINTHS * (part > 0)
    return min(NINTHS - 1, max(1, round(NINTHS * part / whole)))


def _shares(wrong: Tensor, quantity: str, problem: Problem) -> str:
    there = dict(_places(quantity, tuple(wrong.shape), problem))
    digits = []
    for name in PLACES:
        among = wrong[there[name]] if name in there else wrong[:0]
        digits.append(str(_ninths(int(among.sum()), among.numel())) if among.numel() else NO_PLACE)
    return "".join(digits)


def _places(quantity: str, shape: tuple[int, ...], problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """(place, which elements are in it) for what the quantity has axes for."""
    axes = coordinates(quantity, shape, problem)
    if "token" in axes:
        token, chunk = axes["token"], axes["chunk"]
        inside = token >= 0
        last = torch.tensor([*problem.lengths, 0])[axes["sequence"]] - 1
        yield "outside", ~inside
        yield "first token", token == 0
        yield "last token", inside & (token == last)
        yield "last chunk", inside & (chunk == last // problem.chunk_size) & (chunk > 0)
        yield "chunk start", (token > 0) & (token % problem.chunk_size == 0)
        yield "block start", (token > 0) & (token % BLOCK == 0)
        yield "later blocks", axes["block of 16"] > 0
    if "chunk" in axes:
        yield "first chunk", axes["chunk"] == 0
        yield "later chunks", axes["chunk"] > 0
    if "sequence" in axes and len(problem.lengths) > 1:
        yield "first sequence", axes["sequence"] == 0
        yield "later sequences", axes["sequence"] > 0
    head = axes.get("value head", axes.get("query head"))
    if head is not None and int(head.max() if head.numel() else 0) > 0:
        yield "first head", head == 0
        yield "later heads", head > 0
        if "value head" in axes and problem.group > 1:
            yield "first of group", head % problem.group == 0
            yield "rest of group", head % problem.group > 0
    channel = axes.get("channel", axes.get("k channel"))
    if channel is not None and channel.numel():
        yield "first channel", channel == 0
        yield "upper channels", channel >= (int(channel.max()) + 1) // 2
    if "k channel" in axes and problem.K == problem.V:
        yield "diagonal", axes["k channel"] == axes["v channel"]
