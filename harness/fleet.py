"""Authority on what the runners of a fleet share: problems that failed anywhere, in databases that outlive a run."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from harness.globs import matches
from harness.problem import Problem
from harness.results import Finding
from harness.subject import Subject
from harness.variants import VARIANTS

LOCAL = "examples"  # of a report folder: what its runs found, whatever else is written to
ARTIFACT = "kda-examples"  # that folder as an artifact of a GitHub run
FOR = timedelta(days=90)  # after which a Redis server forgets what nobody has asked for
ANSWER_SECONDS = 3.0  # for a server to answer
PAUSE = 15.0  # seconds for which a database that failed is left alone
MOST = 100  # problems of a route that are replayed, the shortest ones
MOST_WAITING = 10_000  # that are kept to be sent later; more are in the local folder only

T = TypeVar("T")


@dataclass(frozen=True)
class Replay:
    """A problem that once failed on a route, and the form of the call that it failed in."""

    route: str
    problem: Problem
    form: str = ""

    @classmethod
    def of(cls, text: str) -> "Replay":
        """That of a JSON document; ValueError for anything else."""
        problem = Problem.from_json(text)
        found = json.loads(text)["found"]
        route, form = (found.get(name) if isinstance(found, dict) else None for name in ("route", "form"))
        if not isinstance(route, str) or form not in ("", *VARIANTS):
            raise ValueError(f"found is {found!r}; it must have a route and a form")
        return cls(route, problem, form)


class Steadfast(ExampleDatabase):
    """A database elsewhere, that may go away and come back: what could not be saved is saved once it is there again.

    A failure costs a warning, and nobody asks again for PAUSE seconds.
    """

    def __init__(self, database: ExampleDatabase, name: str):
        super().__init__()
        self.database, self.name = database, name
        self._waiting: dict[tuple[bytes, bytes], None] = {}
        self._down = False
        self._not_before = 0.0

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return iter(self._tried(lambda: list(self.database.fetch(key)), []))

    def save(self, key: bytes, value: bytes) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting[key, value] = None
        self._tried(lambda: None, None)

    def delete(self, key: bytes, value: bytes) -> None:
        self._waiting.pop((key, value), None)
        self._tried(lambda: self.database.delete(key, value), None)

    def close(self) -> None:
        """A last try for what waits; says what is left."""
        self._not_before = 0.0
        if self._waiting:
            self._tried(lambda: None, None)
        if self._waiting:
            _say(f"{self.name} lacks {len(self._waiting)} that are in the local folder; the next run sends them")

    def _tried(self, action: Callable[[], T], otherwise: T) -> T:
        if time.monotonic() < self._not_before:
            return otherwise
        try:
            while self._waiting:
                first = next(iter(self._waiting))
                self.database.save(*first)
                del self._waiting[first]
            done = action()
        except Exception as error:  # whatever a client raises: it must not end the run
            self._not_before = time.monotonic() + PAUSE
            if not self._down:
                _say(f"{self.name} does not answer ({_line(error)}); the local folder has everything")
            self._down = True
            return otherwise
        if self._down:
            _say(f"{self.name} is back")
        self._down = False
        return done


class Fleet:
    """The local folder, which is always written, and what is shared with other runners, if anything."""

    def __init__(self, local: Path, where: str | None = None):
        """`where`: redis://…, github://OWNER/REPO[/ARTIFACT] or a folder; without it what KDA_DATABASE says.

        ValueError for anything else.
        """
        where = where or os.environ.get("KDA_DATABASE")
        self.local = DirectoryBasedExampleDatabase(local)
        self.shared = Steadfast(_opened(where, local), f"database {_shown(where)}") if where else None
        self.database = MultiplexedDatabase(self.local, self.shared) if self.shared else self.local

    def add(self, subject: str, finding: Finding) -> None:
        """Keep the problem of a finding."""
        found = {"route": finding.route, "form": finding.variant, "quantity": finding.quantity, "class": finding.klass}
        text = finding.problem.to_json(found)
        self.database.save(_key(subject, finding.route, finding.problem.entry), text.encode())

    def replays(self, subject: Subject, routes: str = "*") -> list[str]:
        """The documents of what failed on routes that match, for `Replay.of`; none without anything shared.

        What only the local folder has is shared now.
        """
        if self.shared is None:
            return []
        return [
            text
            for route in subject.routes
            if matches(route.id, routes)
            for text in self._known(_key(subject.name, route.id, route.entry), route.id, route.entry)
        ]

    def _known(self, key: bytes, route: str, entry: str) -> Iterator[str]:
        here, there = set(self.local.fetch(key)), set(self.shared.fetch(key))
        for value in sorted(here - there):
            self.shared.save(key, value)
        count = 0
        for value in sorted(here | there, key=lambda value: (len(value), value)):
            try:
                text = value.decode()
                replay = Replay.of(text)
            except ValueError as error:
                _say(f"the database has something else than a problem for {route}, which is left out ({_line(error)})")
                continue
            if (replay.route, replay.problem.entry) == (route, entry) and count < MOST:
                count += 1
                yield text

    def close(self) -> None:
        if self.shared:
            self.shared.close()


def _key(subject: str, route: str, entry: str) -> bytes:
    """Where a subject is imported from does not matter."""
    return f"kda {subject.partition('@')[0]} {route} {entry}".encode()


def _opened(where: str, local: Path) -> ExampleDatabase:
    scheme, separator, rest = where.partition("://")
    if not separator:
        return _folder(Path(where), where)
    if scheme in ("redis", "rediss", "unix"):
        return _redis(where)
    named = re.fullmatch(r"([\w.-]+)/([\w.-]+)(?:/([\w.-]+))?", rest) if scheme == "github" else None
    if not named:
        raise ValueError(
            f"database is {_shown(where)!r}; it must be redis://…, github://OWNER/REPO[/ARTIFACT] or a folder"
        )
    cache = local.with_name(f"{local.name}-of-github")
    return ReadOnlyDatabase(GitHubArtifactDatabase(named[1], named[2], named[3] or ARTIFACT, path=cache))


def _folder(path: Path, where: str) -> ExampleDatabase:
    """Read only where it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"database is {where!r}; it must be a folder, or one that can be made ({error})") from None
    made = DirectoryBasedExampleDatabase(path)
    return made if os.access(path, os.W_OK) else ReadOnlyDatabase(made)


def _redis(url: str) -> ExampleDatabase:
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ValueError(
            f"database is {_shown(url)!r}; it needs the Python package redis, which the extra [fleet] brings"
        ) from None
    patience = {"socket_timeout": ANSWER_SECONDS, "socket_connect_timeout": ANSWER_SECONDS}
    try:
        client = Redis.from_url(url, retry=Retry(NoBackoff(), 1), **patience)
    except ValueError as error:
        raise ValueError(f"database is {_shown(url)!r}; it must be the address of a Redis server ({error})") from None
    return RedisExampleDatabase(client, expire_after=FOR, key_prefix=b"kda-example:")


def _shown(where: str) -> str:
    """Without a password."""
    return re.sub(r"//[^@/]*@", "//", where)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _say(text: str) -> None:
    print(f"kda: {text}", file=sys.stderr, flush=True)
