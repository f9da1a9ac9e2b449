"""Authority on what really ran: every launcher notes (route, kernel, configuration) while a record is open."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Heard = TypeVar("Heard")


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
    with listening(_open, []) as launches:
        yield launches


@contextlib.contextmanager
def listening(listeners: list[Heard], one: Heard) -> Iterator[Heard]:
    """Inside the block `one` is among the listeners, by identity: others may be equal to it."""
    listeners.append(one)
    try:
        yield one
    finally:
        listeners[:] = [other for other in listeners if other is not one]


def is_open() -> bool:
    """Whether anybody reads what launchers note."""
    return bool(_open)


def note(route: str, kernel: str, **configuration: object) -> None:
    """Called by launchers; free while no record is open."""
    for launches in _open:
        launches.append(LaunchRecord(route, kernel, configuration))
