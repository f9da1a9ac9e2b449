"""Authority on the calibration table: how far from the truth correct kernels were seen to come, by platform."""

import json
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
import triton

from harness.isolate import StorageError
from harness.results import write_atomically

TABLE = Path(__file__).with_name("calibration.json")
SCHEMA = 1
OWN = "kda"


def platform(device: str) -> str:
    """What a rounding error depends on: the architecture, torch and triton; no name of a machine."""
    versions = f"torch {_release(torch.__version__)}, triton {_release(triton.__version__)}"
    return f"{_architecture(device)}, {versions}"


def _architecture(device: str) -> str:
    if not device.startswith("cuda"):
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _release(version: str) -> str:
    return version.partition("+")[0]


@dataclass
class Seen:
    """The extremes of some verdicts.

    `z`: of an element, its error beyond the rounding of the output in sigmas; `ratio`: the worst of all statistics as a
    share of its limit, and its name.
    """

    z: float = 0.0
    ratio: float = 0.0
    statistic: str = ""
    elements: int = 0
    problems: int = 0

    def __add__(self, other: "Seen") -> "Seen":
        worse = max((self, other), key=lambda seen: seen.ratio)
        return Seen(
            max(self.z, other.z),
            worse.ratio,
            worse.statistic,
            self.elements + other.elements,
            self.problems + other.problems,
        )


Cell = tuple[str, str, str]  # route, dtype, quantity


@dataclass
class Row:
    """What was seen on one platform of one subject.

    `cells`: (route, dtype, quantity) -> family -> what was seen; `rounds`: of problems that were drawn, by seed;
    `problems` that were judged, and `findings`, false alarms if the kernels are right.
    """

    cells: dict[Cell, dict[str, Seen]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    problems: int = 0
    findings: list[dict[str, object]] = field(default_factory=list)

    def add(self, cell: Cell, family: str, seen: Seen) -> None:
        families = self.cells.setdefault(cell, {})
        families[family] = families.get(family, Seen()) + seen

    def pooled(self, cell: Cell) -> Seen:
        """Over all families."""
        return sum(self.cells[cell].values(), Seen())

    def elements(self) -> dict[tuple[str, str], int]:
        """How many were judged, by (route, dtype)."""
        counts: dict[tuple[str, str], int] = {}
        for (route, dtype, _), families in self.cells.items():
            more = sum(seen.elements for seen in families.values())
            counts[route, dtype] = counts.get((route, dtype), 0) + more
        return counts


class Table:
    """The rows of a file, by subject and platform; what it says of others stays as it is."""

    def __init__(self, path: Path = TABLE):
        self.path = path
        self.rows = _load(path)

    def row(self, subject: str, where: str) -> Row:
        return self.rows.setdefault((subject, where), Row())

    def save(self) -> None:
        """StorageError if it cannot be written."""
        rows = ",\n".join(_as_text(*key, row) for key, row in sorted(self.rows.items()))
        try:
            write_atomically(self.path, f'{{"schema": {SCHEMA}, "rows": [\n{rows}\n]}}\n')
        except OSError as error:
            raise StorageError(
                f"table is {str(self.path)!r}; it must be a file that can be written ({error})"
            ) from None


def missing(device: str, path: Path | None = None) -> str | None:
    """One line to warn with where our own kernels have not been held to the limits; None where they have."""
    where = platform(device)
    if any(row.problems for key, row in _load(path or TABLE).items() if key == (OWN, where)):
        return None
    return f"limits are not calibrated on {where}: `kda calibrate` counts false alarms there"


def _as_text(subject: str, where: str, row: Row) -> str:
    """A row as JSON, a cell to a line: `all` families, then each, as [z, ratio, statistic, elements, problems]."""
    about = {"subject": subject, "platform": where, "problems": row.problems}
    rounds = {str(seed): count for seed, count in sorted(row.rounds.items())}
    cells = [
        {
            **dict(zip(("route", "dtype", "quantity"), cell)),
            "all": _as_list(row.pooled(cell)),
            "families": {name: _as_list(seen) for name, seen in sorted(families.items())},
        }
        for cell, families in sorted(row.cells.items())
    ]
    head = json.dumps({**about, "rounds": rounds, "findings": row.findings})
    lines = ",\n".join(json.dumps(cell, allow_nan=False) for cell in cells)
    return f'{head[:-1]}, "cells": [\n{lines}\n]}}'


def _as_list(seen: Seen) -> list[float | int | str]:
    return [x if not isinstance(x, float) else float(f"{x:.4g}") if math.isfinite(x) else str(x) for x in astuple(seen)]


def _load(path: Path) -> dict[tuple[str, str], Row]:
    """ValueError for a file that is no such table; no file is an empty one."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema is {document['schema']!r}, must be {SCHEMA}")
        return {(row["subject"], row["platform"]): _row(row) for row in document["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"table is {str(path)!r}; it must be one that `kda calibrate` wrote ({error!r})") from None


def _row(stored: dict) -> Row:
    cells = {
        (cell["route"], cell["dtype"], cell["quantity"]): dict(_families(cell["families"])) for cell in stored["cells"]
    }
    rounds = {int(seed): count for seed, count in stored["rounds"].items()}
    return Row(cells, rounds, stored["problems"], list(stored["findings"]))


def _families(stored: dict) -> Iterable[tuple[str, Seen]]:
    for name, (z, ratio, statistic, elements, problems) in stored.items():
        yield name, Seen(float(z), float(ratio), statistic, elements, problems)
