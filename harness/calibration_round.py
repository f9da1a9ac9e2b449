"""Authority on a round of `kda calibrate`: which problems it has, in which order, and which of them have many heads."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from harness.call import Route
from harness.check import draw
from harness.families import FAMILIES, Family
from harness.fitting import drawn_for, fitted
from harness.globs import matches
from harness.problem import Problem
from harness.subject import Subject

FORMATS = (("bf16", "ieee"), ("fp32", "ieee"), ("fp16", "ieee"), ("fp32", "tf32"))  # dtype and precision, by turns
DRAWN = len(FORMATS)  # generated problems to a route and a family, times its weight, besides one of its examples
LONGEST = 66  # about, of a generated problem
SEEDS = 100_003  # between two rounds: examples get seeds of their own in each
WIDTHS = ((64, 64), (128, 128), (64, 64), (16, 16))  # K and V by turns on a GPU, where each has to be compiled
# NOTE [Wide problems]
# Generated problems are small, so that many are judged; most elements come from a few with many heads. Those are no
# compile key of our kernels, and few keys of others' where their number doubles. The limits keep the oracle on the CPU,
# and a verdict by all replicas of a screen to about 5 s of one core.
WIDE = 4  # of each route and dtype in a round
WIDE_ELEMENTS, WIDE_ROWS, WIDE_HEADS = 800_000, 200_000, 1024  # at most
LIKE = {"o": "do", "ht": "dht", "h": "dht"}  # streams with the shape of a quantity that is no gradient; h: by chunks


@dataclass(frozen=True)
class Task:
    """A problem on a route. `wide`: it may be `widened`."""

    route: str
    family: str
    problem: Problem
    wide: bool = False

    @property
    def dtype(self) -> str:
        """What a cell of the table goes by: of the gate where there is nothing else; products of fp32 apart."""
        if self.problem.entry == "gate":
            return self.problem.gate_dtype
        return self.problem.dtype + ("-tf32" if self.problem.precision == "tf32" else "")

    @property
    def kind(self) -> tuple[str, str]:
        """What has to have enough elements: (route, dtype)."""
        return self.route, self.dtype

    def widened(self) -> "Task":
        """With so many more heads as NOTE [Wide problems] has it, if it is to be wide."""
        return replace(self, problem=widened(self.problem)) if self.wide else self


@dataclass(frozen=True)
class Choice:
    """The routes and families asked for, and the problems of each round."""

    subject: Subject
    routes: str
    families: str
    device: str
    _drawn: dict[tuple[str, str], list[Problem]] = field(default_factory=dict)  # of this round, for every route

    def round(self, number: int, seed: int) -> list[Task]:
        """Fresh problems for every route and family, the same ones for the same number and seed.

        By turns over routes and dtypes, those to be widened first: a round that is cut short has some of each. Every
        round begins with other families.
        """
        self._drawn.clear()
        first = WIDE * number % len(FAMILIES)
        queues = [
            list(self._tasks(route, family, number, seed + SEEDS * (number + 1)))
            for family in FAMILIES[first:] + FAMILIES[:first]
            if matches(family.name, self.families) and not family.gpu_only
            for route in self.subject.routes
            if matches(route.id, self.routes) and drawn_for(route.entry) in family.entries
        ]
        kinds: dict[tuple[str, str], list[Task]] = {}
        for task in _by_turns(queues):
            mine = kinds.setdefault(task.kind, [])
            wide = task.wide and sum(other.wide for other in mine) < WIDE
            mine.append(replace(task, wide=wide))
        return list(_by_turns(sorted(mine, key=lambda task: not task.wide) for mine in kinds.values()))

    def _tasks(self, route: Route, family: Family, number: int, fresh: int) -> Iterator[Task]:
        example = replace(family.examples[number % len(family.examples)], seed=fresh)
        drawn = self._draw(family, drawn_for(route.entry), fresh)
        varied = (_varied(problem, number, number + turn, self.device) for turn, problem in enumerate(drawn))
        for place, problem in enumerate((example, *varied)):
            fit = fitted(problem, route.id, route.entry)
            if fit is not None and not route.lacks(fit):
                yield Task(route.id, family.name, fit, wide=place > 0 and self.device != "cpu")

    def _draw(self, family: Family, entry: str, fresh: int) -> list[Problem]:
        if (family.name, entry) not in self._drawn:
            longest = LONGEST if self.device != "cpu" else LONGEST // 2
            # The first that Hypothesis draws is the simplest there is, every time.
            self._drawn[family.name, entry] = draw(family, entry, DRAWN * family.weight + 1, fresh, longest)[1:]
        return self._drawn[family.name, entry]


def _by_turns(queues: Iterable[list[Task]]) -> Iterator[Task]:
    """The first of every queue, then the second of each, ..."""
    return (task for turn in itertools.zip_longest(*queues) for task in turn if task is not None)


def _varied(problem: Problem, number: int, turn: int, device: str) -> Problem:
    """In the format whose turn it is, and on a GPU with widths and a dtype of the gates that many problems share."""
    dtype, precision = FORMATS[turn % len(FORMATS)]
    problem = replace(problem, dtype=dtype, precision=precision if problem.entry == "chunk" else "ieee")
    alone = problem.entry == "gate"
    if device == "cpu":
        return replace(problem, gate_dtype=dtype) if alone else problem
    K, V = WIDTHS[number % len(WIDTHS)]
    return replace(problem, gate_dtype=dtype if alone or problem.seed % 2 else "fp32", K=K, V=1 if alone else V)


def widened(problem: Problem) -> Problem:
    """With more heads, value heads alike, as many times as the limits of NOTE [Wide problems] allow."""
    own = (elements_of(problem), rows_of(problem), problem.value_heads)
    times = min(limit // max(1, size) for limit, size in zip((WIDE_ELEMENTS, WIDE_ROWS, WIDE_HEADS), own))
    return replace(problem, heads=problem.heads * 2 ** max(0, times.bit_length() - 1))


def elements_of(problem: Problem) -> int:
    """In all quantities of a problem."""
    sizes = {name: prod(problem.shape(LIKE.get(name, name[1:]))) for name in problem.quantities()}
    if "h" in sizes:
        sizes["h"] = sizes["h"] // len(problem.lengths) * chunks_of(problem)
    return sum(sizes.values())


def rows_of(problem: Problem) -> int:
    """Tokens x heads x K, by which a verdict costs: of whole chunks where there are any, and none of a gate alone."""
    tokens = {"gate": 0, "chunk": chunks_of(problem) * problem.chunk_size}.get(problem.entry, sum(problem.lengths))
    return tokens * problem.value_heads * problem.K


def chunks_of(problem: Problem) -> int:
    """Of all sequences, begun ones too."""
    return sum(-(-length // problem.chunk_size) for length in problem.lengths)
