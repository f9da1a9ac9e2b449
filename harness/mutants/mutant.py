"""Authority on what a mutant is: text replaced in a copy of our own sources, its kind, and what became of it."""

import ast
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]  # of kda, and in a checkout of the tests

# What real KDA kernels have had.
KINDS: Mapping[str, str] = {
    "compiler": "a compiler's or autotuner's choice",
    "mask": "a missing mask, 0 x inf",
    "ragged": "a ragged or packed boundary",
    "stale_memory": "uninitialised or stale memory",
    "strided": "a non-contiguous tensor",
    "offsets_32": "32-bit offsets",
    "formula": "a wrong formula, base or condition",
    "overflow": "exp overflows, or its range is not checked",
    "head": "a wrong head, batch or stride offset",
    "precision": "digits lost",
    "inverse": "an unstable inverse of I + L",
    "cache": "a cache keyed too loosely",
    "ignored_argument": "an argument ignored, or contradictory",
    "validation": "missing validation",
    "dispatch": "a backend takes what it cannot do, or never runs",
    "causality": "the future affects the past",
    "race": "a race, or a missing barrier",
    "missing_gradient": "a missing path of a gradient",
    "grid_limit": "a launch grid beyond the hardware's limit",
    "layout": "two kernels disagree about a layout",
    "nan_spreads": "NaN spreads to what it must not reach",
    "context_parallel": "shards, ranks, straddling sequences",
    "slots": "index -1 or 0 of a paged state, a draft not taken back",
}


@dataclass(frozen=True)
class Patch:
    """`before`, which must occur exactly once in `file` (inside `within`, a function, where given), becomes `after`."""

    file: str
    before: str
    after: str
    within: str = ""

    def apply(self, text: str) -> str:
        """The patched text of the file; ValueError unless there is exactly one place for it."""
        start, end = self._region(text)
        count = text.count(self.before, start, end)
        if count != 1:
            raise ValueError(f"{self.file} {self.within} has {count} of {self.before!r}; it must have exactly 1")
        place = text.index(self.before, start, end)
        return text[:place] + self.after + text[place + len(self.before) :]

    def function(self, text: str) -> str:
        """The name of the innermost function that the patched place is in; "" at the top of a module."""
        start, end = self._region(text)
        line = text.count("\n", 0, text.index(self.before, start, end) + len(self.before) - len(self.before.lstrip()))
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        around = [node for node in nodes if node.lineno <= line + 1 <= node.end_lineno]
        return max(around, key=lambda node: node.lineno).name if around else ""

    def _region(self, text: str) -> tuple[int, int]:
        if not self.within:
            return 0, len(text)
        found = list(re.finditer(rf"^ *def {re.escape(self.within)}\(", text, re.MULTILINE))
        if len(found) != 1:
            raise ValueError(f"{self.file} has {len(found)} functions {self.within}; it must have exactly 1")
        following = re.compile(r"^(?:@|def |class |    def |    @)", re.MULTILINE).search(text, found[0].end())
        return found[0].start(), following.start() if following else len(text)


@dataclass(frozen=True)
class Mutant:
    """One fault. `fault`: what it does, in a line; `kind`: one of `KINDS`.

    `route` and `entry` reach it; `families` are likeliest to show it and go first. `tests` are files or tests of the
    test-suite that look for it where no problem can. `limit` says why nothing here can see it, and at which size
    something would; `equivalent` why it is no fault at all.
    """

    id: str
    kind: str
    fault: str
    patches: tuple[Patch, ...]
    route: str = "recurrent"
    entry: str = "recurrent"
    families: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    limit: str = ""
    equivalent: str = ""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"Mutant.kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")

    @property
    def must_be_caught(self) -> bool:
        return not (self.limit or self.equivalent)

    @property
    def place(self) -> str:
        """file:function of the first patch."""
        first = self.patches[0]
        return f"{first.file}:{first.function((SOURCES / first.file).read_text())}".rstrip(":")

    def write(self, folder: Path) -> None:
        """A copy of the package kda in `folder`, with the fault in it."""
        shutil.copytree(SOURCES / "kda", folder / "kda", ignore=shutil.ignore_patterns("__pycache__"))
        for patch in self.patches:
            path = folder / patch.file
            path.write_text(patch.apply(path.read_text()))


@dataclass(frozen=True)
class Trial:
    """What became of a mutant. `layer`: value, near_exact, tail, a variant's name, repeat, inputs, launch record,
    refusal, crash, hang or tests; `family`, `problem`: where it showed, after how many problems and seconds.
    """

    mutant: str
    caught: bool
    layer: str = ""
    family: str = ""
    quantity: str = ""
    problem: str = ""
    problems: int = 0
    seconds: float = 0.0
    ratio: float = 0.0
    message: str = ""
