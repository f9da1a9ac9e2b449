"""Authority on the data behind a report's figures: panels of error over tolerance, with borders and values to hover."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.field import Field
from harness.localise import coordinates
from harness.problem import Problem
from harness.report.numbers import place, short
from harness.rows import BY_TOKEN, PER_QUERY_HEAD

MOST_COLUMNS, MOST_ROWS = 384, 128  # of a panel; beyond them a cell shows the worst of several elements
MOST_CELLS = 24_000  # of all panels of a report


@dataclass(frozen=True)
class _Plane:
    """A slice of a quantity, rows by columns; `cells` are flat indices into it, and `about` says which slice."""

    about: str
    across: str
    down: str
    cells: Tensor
    borders: list[dict[str, object]]


def panels(field: Field, problem: Problem, cells: int = MOST_CELLS) -> list[dict[str, object]]:
    """The planes of a quantity, the worst first, as far as `cells` go."""
    ratio, drawn, left = field.ratio.flatten(), [], cells
    worst_first = sorted(_planes(field, problem), key=lambda plane: -float(ratio[plane.cells].max()))
    for plane in worst_first:
        panel = _drawn(plane, field, ratio)
        left -= len(panel["ratio"])
        if drawn and left < 0:
            break
        drawn.append(panel)
    return drawn


def _planes(field: Field, problem: Problem) -> list[_Plane]:
    name, shape = field.quantity, field.expected.shape
    flat = torch.arange(field.expected.numel()).view(shape)
    if not flat.numel():
        return []
    if name in BY_TOKEN:
        head = "query head" if name in PER_QUERY_HEAD else "value head"
        by_head = flat.flatten(0, 1).permute(1, 2, 0)
        return [_Plane(f"{head} {h}", "token", "channel", x, _borders(problem)) for h, x in enumerate(by_head)]
    if name == "dbeta":
        return [_Plane("all heads", "token", "value head", flat.flatten(0, 1).T, _borders(problem))]
    if name in ("ht", "dh0", "h"):
        down, across = ("v channel", "k channel") if problem.v_first else ("k channel", "v channel")
        lead = flat.flatten(0, -3)
        labels = [
            ", ".join(f"{axis} {int(x[..., 0, 0].flatten()[i])}" for axis, x in _leading(field, problem).items())
            for i in range(len(lead))
        ]
        return [_Plane(label, across, down, x, []) for label, x in zip(labels, lead)]
    if name == "ddt_bias":
        return [_Plane("all heads", "channel", "value head", flat.view(-1, problem.K), [])]
    return [_Plane("all heads", "value head", "", flat.view(1, -1), [])]


def _leading(field: Field, problem: Problem) -> dict[str, Tensor]:
    axes = coordinates(field.quantity, tuple(field.expected.shape), problem)
    return {axis: x for axis, x in axes.items() if "channel" not in axis and int(x.max()) > 0}


def _borders(problem: Problem) -> list[dict[str, object]]:
    """Where sequences and chunks begin, in rows of the flattened batch."""
    out, start = [], 0
    for n, length in enumerate(problem.lengths):
        if n:
            out.append({"at": start, "kind": "sequence", "label": f"sequence {n}"})
        out += [
            {"at": start + step, "kind": "chunk", "label": f"chunk {step // problem.chunk_size}"}
            for step in range(problem.chunk_size, length, problem.chunk_size)
        ]
        start += length
    if problem.tail:
        out.append({"at": start, "kind": "sequence", "label": "unused tail"})
    return out


def _drawn(plane: _Plane, field: Field, ratio: Tensor) -> dict[str, object]:
    rows, columns = plane.cells.shape
    high, wide = math.ceil(rows / MOST_ROWS), math.ceil(columns / MOST_COLUMNS)
    chosen = _worst_of(plane.cells, ratio, high, wide)
    flat = chosen.flatten()
    got, expected, tolerance = (x.flatten()[flat].tolist() for x in (field.got, field.expected, field.tolerance))
    index = torch.stack(torch.unravel_index(flat, field.expected.shape), 1).tolist() if field.expected.dim() else [[]]
    return {
        "quantity": field.quantity,
        "about": plane.about,
        "across": plane.across,
        "down": plane.down,
        "rows": chosen.shape[0],
        "columns": chosen.shape[1],
        "high": high,
        "wide": wide,
        "borders": [{**border, "at": border["at"] / wide} for border in plane.borders],
        "ratio": [_number(x) for x in ratio[flat].tolist()],
        "got": [short(x) for x in got],
        "expected": [short(x) for x in expected],
        "tolerance": [short(x, 3) for x in tolerance],
        "index": [place(field.quantity, tuple(i)) for i in index],
    }


def _worst_of(cells: Tensor, ratio: Tensor, high: int, wide: int) -> Tensor:
    """For tiles of high x wide elements the flat index of the worst one."""
    if high == wide == 1:
        return cells
    rows, columns = cells.shape
    padded = torch.nn.functional.pad(cells, (0, -columns % wide, 0, -rows % high), value=-1)
    tiles = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
    values = torch.where(tiles >= 0, ratio[tiles.clamp(min=0)], -1.0)
    return tiles.gather(2, values.argmax(2, keepdim=True)).squeeze(2)


def _number(x: float) -> float | None:
    """A JSON number of four digits; None for infinity."""
    return float(f"{x:.4g}") if math.isfinite(x) else None
