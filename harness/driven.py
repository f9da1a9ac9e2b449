"""Authority on generated problems that go where it gets close: Hypothesis draws on from what came nearest its limit."""

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import hypothesis
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from harness.problem import Problem
from harness.profiles import drawing
from harness.runner import Checked

T = TypeVar("T", bound=Hashable)


class _Stop(BaseException):
    """Ends a search from inside; no Exception, which Hypothesis would take for a failing test."""


class Driver(Generic[T]):
    """One search, in a thread that waits for the ratios of each task before it draws the next.

    `task_of` makes a task of a problem, or None where nothing can be made of it. The same ratios for the same tasks
    give the same search again. At most `count` problems are drawn, which bounds what a search remembers.
    """

    def __init__(
        self, strategy: SearchStrategy[Problem], task_of: Callable[[Problem], T | None], count: int, seed: int
    ):
        self.strategy, self.task_of, self.count, self.seed = strategy, task_of, count, seed
        self._tasks: queue.Queue[T | BaseException | None] = queue.Queue()
        self._ratios: queue.Queue[Mapping[str, float] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def next(self) -> T | None:
        """The next task, whose ratios must then be told; None once there is none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._search, daemon=True)
            self._thread.start()
        made = self._tasks.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def tell(self, ratios: Mapping[str, float]) -> None:
        """How close the last task came, by quantity; 1 is the limit."""
        self._ratios.put(ratios)

    def close(self) -> None:
        """End a search whose last task has no ratios."""
        self._ratios.put(None)

    def _search(self) -> None:
        known: dict[T, Mapping[str, float]] = {}

        @hypothesis.seed(self.seed)
        @drawing(self.count, targeted=True)
        @hypothesis.given(self.strategy)
        def search(problem: Problem) -> None:
            task = self.task_of(problem)
            hypothesis.assume(task is not None)
            if task not in known:
                self._tasks.put(task)
                told = self._ratios.get()
                if told is None:
                    raise _Stop
                known[task] = told
            for quantity, ratio in known[task].items():
                hypothesis.target(ratio, label=quantity)

        last: BaseException | None = None
        try:
            with contextlib.suppress(_Stop, Unsatisfiable):
                search()
        except BaseException as error:
            last = error
        self._tasks.put(last)


def heights(checked: Checked) -> dict[str, float]:
    """The worst ratio of each quantity that is right. What is wrong is found already, and would hold up the search."""
    found: dict[str, float] = {}
    for verdict in checked.verdicts:
        if verdict.klass == "OK" and math.isfinite(verdict.ratio):
            found[verdict.quantity] = max(verdict.ratio, found.get(verdict.quantity, 0.0))
    return found


def driven(
    drivers: Iterable[Driver[T]], width: int, check: Callable[[list[T]], Iterable[Checked]]
) -> Iterator[tuple[T, Checked]]:
    """Every task that the drivers make, with its result; `width` drivers at a time, each with a task under way.

    `check` gives results in the order of its tasks; fewer mean that there is no more time.
    """
    waiting, active = deque(drivers), []
    try:
        while waiting or active:
            active += [waiting.popleft() for _ in range(min(len(waiting), width - len(active)))]
            made = [(driver, driver.next()) for driver in active]
            asked = [(driver, task) for driver, task in made if task is not None]
            active = [driver for driver, _ in asked]
            answered = 0
            for (driver, task), checked in zip(asked, check([task for _, task in asked])):
                yield task, checked
                driver.tell(heights(checked))
                answered += 1
            if answered < len(asked):
                return
    finally:
        for driver in active:
            driver.close()
