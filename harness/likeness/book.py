"""Authority on the book of signatures: which known faults have which signature, and which of them a failure is like."""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.likeness.signature import Signature, similarity

BOOK = Path(__file__).with_name("signatures.json")
SCHEMA = 1
UNSHOWN = 0.7  # of the score of a fault that never shows what has failed
ABOUT = ("kind", "place", "fault", "route", "entry")


@dataclass(frozen=True)
class Entry:
    """One known fault of our own kernels: a mutant, by its id, with `place`, file:function of our sources."""

    id: str
    kind: str
    place: str
    fault: str
    route: str
    entry: str
    signature: Signature


@dataclass(frozen=True)
class Like:
    """A known fault that a failure is like, and how much, in [0, 1]."""

    known: Entry
    score: float

    def __str__(self) -> str:
        return f"{self.known.id} {self.score:.2f} ({self.known.place}: {self.known.fault})"


def read(path: Path = BOOK) -> tuple[Entry, ...]:
    """Every entry of a book; ValueError where it is not one."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}")
    return tuple(_entry(path, name, stored) for name, stored in document["mutants"].items())


def _entry(path: Path, name: str, stored: Mapping) -> Entry:
    try:
        about = {key: stored[key] for key in ABOUT}
        return Entry(name, **about, signature=Signature.from_dict(stored["answers"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: the signature of {name} is not readable: {error}") from None


@functools.cache
def known() -> tuple[Entry, ...]:
    """The book that is shipped."""
    return read()


def written(entries: Iterable[Entry]) -> str:
    """The text of a book: in the order of ids, a line for each probe."""
    lines = []
    for one in sorted(entries, key=lambda one: one.id):
        about = ", ".join(f"{json.dumps(key)}: {json.dumps(getattr(one, key))}" for key in ABOUT)
        answers = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in one.signature.as_dict().items())
        lines.append(f'  {json.dumps(one.id)}: {{{about}, "answers": {{\n{answers}}}}}')
    return f'{{"schema": {SCHEMA}, "mutants": {{\n' + ",\n".join(lines) + "\n}}\n"


def likest(
    signature: Signature, route: str, entry: str, quantity: str = "", among: Iterable[Entry] | None = None
) -> list[Like]:
    """The known faults by how alike their signatures are, the likest first; those that have nothing in common are left
    out.

    Those of this very route; for a route that none is of, those of every route that takes the same calls. A fault that
    gets `quantity` right in every probe counts for less.
    """
    every = tuple(known() if among is None else among)
    mine = [one for one in every if (one.route, one.entry) == (route, entry)]
    others = mine or [one for one in every if _takes_same_calls(one.entry, entry)]
    scored = [Like(one, similarity(signature, one.signature) * _shown(one.signature, quantity)) for one in others]
    return sorted((like for like in scored if like.score > 0), key=lambda like: (-like.score, like.known.id))


def _shown(signature: Signature, quantity: str) -> float:
    shown = any(name.split(" ")[-1] == quantity for wrong in signature.answers.values() for name in wrong)
    return 1.0 if shown or not quantity else UNSHOWN


def _takes_same_calls(one: str, other: str) -> bool:
    """Probes of the recurrent entry are put to the chunk entry too."""
    return one == other or {one, other} <= {"recurrent", "chunk"}
