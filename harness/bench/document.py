"""Authority on the JSON that a bench run leaves: what is in it, and how it is read back."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.bench.timing import Summary
from harness.results import write_atomically

SCHEMA, KIND = 1, "bench"


@dataclass(frozen=True)
class Row:
    """One contender on one case in one mode. Times in milliseconds, `errors` relative rms by quantity."""

    case: str
    mode: str
    contender: str
    eager: Summary
    host: Summary
    graph: Summary | None
    no_graph: str  # why there is none
    first_call_seconds: float
    compile_seconds: float  # of the first call's, in Triton's compiler
    peak_bytes: int  # over the inputs
    moved_bytes: int
    errors: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.mode, self.contender


@dataclass(frozen=True)
class Skipped:
    """Why a contender has no row; an empty case or mode means all of them.

    `kind`: refused (it does not take the case), missing (the subject cannot be had), failed, or left (no time).
    """

    case: str
    mode: str
    contender: str
    reason: str
    kind: str = "refused"


@dataclass
class Document:
    """One run: its environment, what was asked for, and every row so far."""

    env: Mapping[str, object]
    settings: Mapping[str, object]
    copy_bytes_per_second: float
    problems: dict[str, str] = field(default_factory=dict)  # repr of each case's problem
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """The whole document or, if that fails, what was there before."""
        write_atomically(path, json.dumps({"schema": SCHEMA, "kind": KIND, **_writable(asdict(self))}, indent=1))

    @classmethod
    def load(cls, path: Path) -> "Document":
        """ValueError, with what is wrong, for anything that `save` did not write."""
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not isinstance(read, dict) or (read.pop("schema", None), read.pop("kind", None)) != (SCHEMA, KIND):
            raise ValueError(f"{path} is no bench result of schema {SCHEMA}; `kda bench --json` writes one")
        try:
            rows = [_row(row) for row in read.pop("rows")]
            skipped = [Skipped(**one) for one in read.pop("skipped")]
            return cls(**read, rows=rows, skipped=skipped)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a whole bench result: {error!r}") from None


def _row(read: dict) -> Row:
    times = {name: None if read[name] is None else Summary(**read[name]) for name in ("eager", "host", "graph")}
    return Row(**{**read, **times, "errors": {name: float(x) for name, x in read["errors"].items()}})


def _writable(value: object) -> object:
    """The same value with names for the numbers that JSON does not have; float() reads them back."""
    if isinstance(value, dict):
        return {name: _writable(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
