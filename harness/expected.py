"""Authority on failures that a repository knows of: a file of test ids, each with a day and a reason."""

import datetime
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.holding import WrongResult

FORM = "PATTERN YYYY-MM-DD REASON"


@dataclass(frozen=True)
class Expected:
    """Tests whose id matches `pattern` may give a wrong result up to and including the day `until`."""

    pattern: str
    until: datetime.date
    reason: str
    line: int


def read(path: Path) -> tuple[Expected, ...]:
    """The entries of a file, one to a line; ValueError with file and line for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"kda-xfail is {str(path)!r}; it must be a text file that can be read: {error}") from None
    return tuple(_entry(path, n, text) for n, text in enumerate(lines, 1) if text.split("#", 1)[0].strip())


def _entry(path: Path, number: int, text: str) -> Expected:
    pattern, day, reason, *_ = [*text.strip().split(maxsplit=2), "", "", ""]
    if not reason:
        raise ValueError(f"{path}:{number}: the entry is {text.strip()!r}; it must be {FORM}")
    try:
        until = datetime.date.fromisoformat(day)
    except ValueError:
        raise ValueError(f"{path}:{number}: the day is {day!r}; it must look like 2027-01-31") from None
    return Expected(pattern, until, reason, number)


def identity(item: pytest.Item) -> str:
    """What patterns are matched against: the id in brackets, or the name of a test without one."""
    return item.callspec.id if hasattr(item, "callspec") else item.name


def mark(items: Iterable[pytest.Item], entries: Iterable[Expected], today: datetime.date) -> list[str]:
    """Expect a wrong result of the tests that entries name, and a pass of every other; what is wrong with the entries.

    A marked test that passes fails the run: its entry has to go. One that breaks otherwise is no expected failure.
    """
    unused, told = list(entries), []
    for item in items:
        for entry in entries:
            if not fnmatch.fnmatchcase(identity(item), entry.pattern):
                continue
            if entry in unused:
                unused.remove(entry)
                if today > entry.until:
                    told.append(f"line {entry.line} expired on {entry.until}: {entry.pattern} ({entry.reason})")
            if today <= entry.until:
                reason = f"{entry.reason} (until {entry.until})"
                item.add_marker(pytest.mark.xfail(reason=reason, raises=WrongResult, strict=True))
    return told + [f"line {entry.line} matches no test: {entry.pattern}" for entry in unused]
