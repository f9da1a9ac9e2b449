"""Authority on the record of a check as it goes, on which a later run goes on where one was killed."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.census import Verdict
from harness.isolate import StorageError
from harness.problem import Problem
from harness.results import environment
from harness.runner import Checked

NAME = "journal.jsonl"
SELECTION = (
    "subject",
    "routes",
    "families",
    "device",
    "seed",
    "profile",
    "shape",
    "shard",
    "pin_autotune",
    "sanitizer",
)
SAME = ("torch", "triton", "device", "interpreter")  # of the machine, or results do not belong together


def selection_of(folder: Path) -> dict[str, object]:
    """What the run in a folder was asked for, by the names of the options. ValueError if there is no such run."""
    return _header(folder)["selection"]


class Journal:
    """One line for each problem that a run has done, in their order, after what it found is on disk.

    A line that was cut off is a problem not done. Lines after those of the tasks say themselves what was done:
    `driven` has them by route, family and problem.
    """

    def __init__(self, folder: Path, tasks: Sequence, selection: dict[str, object], device: str):
        self.path = folder / NAME
        env = {name: value for name, value in environment(device).items() if name in SAME}
        self.header = {"schema": 1, "selection": selection, "env": env, "tasks": _digest(tasks)}
        self.tasks = tasks
        self.driven: dict[tuple[str, str, Problem], Checked] = {}
        self.past = self._past(folder)
        self._rewrite(folder)

    def _past(self, folder: Path) -> list[Checked]:
        if not self.path.exists():
            return []
        header = _header(folder)
        for name in ("tasks", "env"):
            if header[name] != self.header[name]:
                was = "other problems" if name == "tasks" else header["env"]
                raise ValueError(f"resume is {str(folder)!r}, a run of {was}; it must be one of {self.header[name]}")
        lines = _lines(self.path)[1:]
        for line in lines[len(self.tasks) :]:
            route, family, text = line["driven"]
            problem = Problem.from_json(text)
            self.driven[route, family, problem] = _checked(problem, route, line)
        return [_checked(task.problem, task.route, line) for task, line in zip(self.tasks, lines)]

    def known(self, task) -> Checked | None:
        """The result of a driven task, if an earlier run has it."""
        return self.driven.get((task.route, task.family, task.problem))

    def _rewrite(self, folder: Path) -> None:
        """Whole lines only: what follows must not continue a line that was cut off."""
        driven = (_record(checked, family) for (_, family, _), checked in self.driven.items())
        text = "".join(json.dumps(x) + "\n" for x in (self.header, *map(_record, self.past), *driven))
        part = self.path.with_suffix(".part")
        try:
            part.write_text(text)
            os.replace(part, self.path)
        except OSError as error:
            raise StorageError(f"report is {str(folder)!r}; it must be a folder to write to ({error})") from None

    def add(self, checked: Checked, driven: str = "") -> None:
        """The next problem is done, or one of the family `driven`. StorageError if that cannot be written down."""
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(_record(checked, driven)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(
                f"{self.path} could not be written ({error}); findings are on disk, go on with --resume"
            ) from None


def _digest(tasks: Iterable) -> str:
    return hashlib.sha256("\n".join(map(repr, tasks)).encode()).hexdigest()


def _lines(path: Path) -> list[dict]:
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _header(folder: Path) -> dict:
    path = folder / NAME
    try:
        lines = _lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"resume is {str(folder)!r}; it must be the folder of a run of `kda check` ({error})"
        ) from None
    if not lines or not {"schema", "selection", "env", "tasks"} <= lines[0].keys():
        raise ValueError(f"resume is {str(folder)!r}; its {NAME} must begin with what the run was asked for")
    return lines[0]


def _record(checked: Checked, driven: str = "") -> dict:
    verdicts = [[v.quantity, v.klass, v.ratio, v.statistic, v.message] for v in checked.verdicts]
    times = [checked.compile_seconds, checked.kernel_seconds, checked.oracle_seconds]
    rest = {"peak": checked.peak_bytes, "proven": checked.proven, "missing": sorted(checked.missing)}
    rest |= {"driven": [checked.route, driven, checked.problem.to_json()]} if driven else {}
    return {"verdicts": verdicts, "seconds": times, **rest}


def _checked(problem: Problem, route: str, line: dict) -> Checked:
    verdicts = [Verdict(*fields) for fields in line["verdicts"]]
    rest = {"peak_bytes": line["peak"], "proven": line["proven"], "missing": frozenset(line["missing"])}
    return Checked(problem, route, verdicts, *line["seconds"], **rest)
