"""Authority on what a run leaves behind: findings on disk once found, and one result document per run."""

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch
import triton

from harness.isolate import StorageError
from harness.problem import Problem
from harness.variants import VARIANTS
from harness.verdict import SEVERITY, Verdict

RESULTS = "results.jsonl"  # of a report folder: a line for each run
FAILURES = frozenset({"BUG", "UNSTABLE", "NONDETERMINISTIC", "CRASH", "HANG", "SUSPECT"})


@dataclass(frozen=True)
class Finding:
    """One distinct failure: the smallest problem known to show it, and the one it was found with."""

    id: str
    route: str
    quantity: str
    klass: str
    ratio: float
    message: str
    problem: Problem
    original: Problem
    path: str = ""
    variant: str = ""  # the form of the call that showed it
    lines: tuple[tuple[str, str], ...] = ()  # of its diagnosis, (label, text)
    like: str = ""  # the known faults that it is like

    @property
    def diagnosis(self) -> dict[str, str]:
        """Everything that is said of it in words, for a JSON document."""
        return dict(self.lines) | ({"like": self.like} if self.like else {})

    @classmethod
    def of(cls, route: str, verdict: Verdict, problem: Problem) -> "Finding":
        variant = form_of(verdict)
        said = f"{route} {verdict.quantity} {verdict.klass} {variant} {problem!r}"
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        name = f"{route}-{verdict.quantity}-{verdict.klass.lower()}-{digest}"
        return cls(
            name, route, verdict.quantity, verdict.klass, verdict.ratio, str(verdict), problem, problem, variant=variant
        )


def form_of(verdict: Verdict) -> str:
    """The form of the call that a verdict is about; "" for the call itself."""
    return verdict.statistic if verdict.statistic in VARIANTS else ""


def load_found(path: Path) -> tuple[str, str, str, str] | None:
    """(route, quantity, class, form) that a problem.json says it was found with, or None; the problem itself is
    `Problem`'s.

    ValueError where the file says anything else there.
    """
    found = json.loads(path.read_text()).get("found")
    if not isinstance(found, dict | None):
        raise ValueError(f"{path}: found is {found!r}; it must be an object, or left out")
    if not found or "class" not in found:
        return None
    named = tuple(found.get(name) for name in ("route", "quantity", "class"))
    if not all(isinstance(name, str) for name in named) or named[2] not in FAILURES:
        known = ", ".join(sorted(FAILURES))
        raise ValueError(f"{path}: found is {named}; it must be a route, a quantity and one of {known}")
    form = found.get("form", "")
    if form and form not in VARIANTS:
        raise ValueError(f"{path}: found has form {form!r}; it must be one of {', '.join(VARIANTS)}")
    return (*named, form)


@dataclass
class Row:
    """One line of the table: a quantity of a route, over all problems of a family."""

    route: str
    quantity: str
    family: str
    problems: int = 0
    worst_ratio: float = 0.0
    klass: str = "OK"
    uninformative: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"compile": 0.0, "kernel": 0.0, "oracle": 0.0})

    def add(self, verdict: Verdict) -> None:
        self.problems += 1
        self.uninformative += verdict.klass == "UNINFORMATIVE"
        if not verdict.ratio <= self.worst_ratio:
            self.worst_ratio = verdict.ratio
        if SEVERITY.index(verdict.klass) > SEVERITY.index(self.klass):
            self.klass = verdict.klass


def environment(device: str) -> dict[str, object]:
    """The versions and the machine that a result depends on."""
    cuda = device.startswith("cuda")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "harness": _own_version(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "interpreter": bool(triton.knobs.runtime.interpret),
        "platform": platform.platform(),
    }


def _own_version() -> str:
    try:
        return metadata.version("kda-harness")
    except metadata.PackageNotFoundError:
        return "source"


class Report:
    """The folder of one run. A finding is on disk before anything else happens to it."""

    def __init__(self, root: Path, folder: Path | None = None, keep: Callable[[Finding], None] = lambda finding: None):
        """`folder`: that of a run to go on with, instead of a new one in `root`. `keep` is told of every finding."""
        self.root, self.keep = root, keep
        self.folder = folder or root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def prepare(self) -> None:
        """Fail now, not after an hour, if nothing can be written here."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise StorageError(
                f"report is {str(self.root)!r}; it must be a folder that can be written to ({error})"
            ) from None

    def save(self, finding: Finding) -> Finding:
        """Write problem.json; saving a finding again replaces its problem by a smaller one, atomically.

        Where that fails the document is printed instead, and the finding has no path: the run goes on.
        """
        self.keep(finding)
        path = self.folder / finding.id / "problem.json"
        found = {
            "route": finding.route,
            "quantity": finding.quantity,
            "class": finding.klass,
            "form": finding.variant,
            "ratio": _number(finding.ratio),
            "message": finding.message,
            "original": repr(finding.original),
            "diagnosis": finding.diagnosis,
        }
        text = finding.problem.to_json(found)
        try:
            write_atomically(path, text)
        except OSError as error:
            print(f"kda: {path} could not be written ({error}):\n{text}", file=sys.stderr, flush=True)
            return finding
        return replace(finding, path=str(path))

    def finish(self, document: dict, extra: Path | None) -> None:
        """Append the run to results.jsonl, and write it to `extra` if given."""
        line = json.dumps(document, allow_nan=False)
        try:
            with open(self.root / RESULTS, "a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
            if extra:
                write_atomically(extra, json.dumps(document, indent=1, allow_nan=False))
        except OSError as error:
            print(line, file=sys.stderr, flush=True)
            raise StorageError(f"the results could not be written ({error}); they are printed above") from None


def probe(path: Path, name: str) -> None:
    """StorageError, now and not after an hour, if this file cannot be written; an existing one stays as it is."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise StorageError(f"{name} is {str(path)!r}; it must be a file that can be written ({error})") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file is there whole, on the device, or not at all. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _number(x: float) -> float | str:
    return x if x == x and abs(x) != float("inf") else str(x)


def document(
    env: dict, subject: str, seed: int, rows: Iterable[Row], findings: Iterable[Finding], coverage: dict
) -> dict:
    """The result JSON of one run."""
    return {
        "schema": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "env": env,
        "subject": subject,
        "seed": seed,
        "routes": [
            {
                "route": row.route,
                "quantity": row.quantity,
                "family": row.family,
                "problems": row.problems,
                "worst_ratio": _number(row.worst_ratio),
                "class": row.klass,
                "uninformative": row.uninformative,
                "seconds": row.seconds,
            }
            for row in rows
        ],
        "coverage": coverage,
        "findings": [
            {
                "id": f.id,
                "route": f.route,
                "quantity": f.quantity,
                "class": f.klass,
                "form": f.variant,
                "ratio": _number(f.ratio),
                "problem": f.problem.as_dict(),
                "path": f.path,
                "diagnosis": f.diagnosis,
            }
            for f in findings
        ],
    }
