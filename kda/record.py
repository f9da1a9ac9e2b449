"""Authority on what really ran: every launcher notes (route, kernel, configuration) while a record is open."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch (or, on the torch route, one evaluation) and the configuration it ran with."""

    route: str
    kernel: str
    configuration: dict[str, object] = field(default_factory=dict)


# Not a context variable: autograd runs backward launches on threads of its own, which see module state only.
_open: list[list[LaunchRecord]] = []


@contextlib.contextmanager
def record_launches() -> Iterator[list[LaunchRecord]]:
    """Collect a `LaunchRecord` for every launch inside the block, in order, those of the backward pass included."""
    launches: list[LaunchRecord] = []
    _open.append(launches)
    try:
        yield launches
    finally:
        _open[:] = [other for other in _open if other is not launches]


def is_open() -> bool:
    """Whether anybody reads what launchers note."""
    return bool(_open)


def note(route: str, kernel: str, **configuration: object) -> None:
    """Called by launchers; free while no record is open."""
    for launches in _open:
        launches.append(LaunchRecord(route, kernel, configuration))
