"""Authority on working through tasks in several processes, with results in the order of the tasks, or as they come."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import autotune, interpreter
from harness.orphans import end_with_parent
from harness.problem import Problem
from harness.runner import Checked, Runner
from harness.subject import load_subject
from harness.verdict import Verdict
from oracle.envelope import LIMITS, Limits

TASKS_PER_PROCESS = 12  # a process costs a few seconds to start
MOST_ON_A_GPU = 8  # contexts that share one device
PAUSES = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds between tries for memory that other processes have
AHEAD = 100  # jobs under way for each process: results come in order, and nobody should wait behind a long one
GLANCE = 0.5  # seconds between two looks at the clock while nothing ends
LARGE_BYTES = 60 * 2**30  # of a GPU's memory that a large job may need, most of it for the oracle


@dataclass(frozen=True)
class Job:
    """One check to be made. `large`: it may need LARGE_BYTES, and so only a few of its kind run at a time."""

    route: str
    problem: Problem
    repeat: bool
    large: bool = False
    forms: tuple[str, ...] = ()  # names of variants to run it in as well


@dataclass(frozen=True)
class Settings:
    """What a process needs to make its own runner."""

    subject: str
    device: str
    folder: Path
    seed: int = 0
    pin_autotune: bool = False
    sanitizer: str | None = None
    limits: Limits = LIMITS


def processes(jobs: int | None, tasks: int, device: str, foreign: bool) -> int:
    """How many processes for so many tasks; None leaves it to the machine, and a foreign subject that tunes to one."""
    if jobs is not None:
        return jobs
    if device != "cpu" and foreign:
        return 1
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there if device == "cpu" else min(there, MOST_ON_A_GPU), tasks // TASKS_PER_PROCESS))


def large_at_a_time(device: str) -> int:
    """How many large jobs a device has memory for."""
    if device == "cpu":
        return 1
    return max(1, torch.cuda.get_device_properties(device).total_memory // LARGE_BYTES)


_runner: Runner | None = None
_seed = 0


def _start(settings: Settings, threads: int) -> None:
    global _runner, _seed
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started this process decides
    torch.set_num_threads(threads)
    if settings.device == "cpu":
        interpreter.install()
    if settings.pin_autotune:
        autotune.pin()
    folder, subject = settings.folder / f"process-{os.getpid()}", load_subject(settings.subject)
    more = {"sanitizer": settings.sanitizer, "limits": settings.limits}
    _runner, _seed = Runner(subject, settings.device, folder, **more), settings.seed


def _checked(runner: Runner, job: Job, seed: int) -> Checked:
    return runner.check(job.route, job.problem, repeat=job.repeat, seed=seed, forms=job.forms)


def _work(job: Job) -> tuple[Checked, bool]:
    checked = with_patience(lambda: _checked(_runner, job, _seed), job)
    checked.runs, checked.varied = [], {}  # outputs are large, and nobody asks for them there
    return checked, _runner.poisoned


def with_patience(check: Callable[[], Checked], job: Job, pauses: Iterable[float] = PAUSES) -> Checked:
    """A check again after each pause, for as long as it finds too little memory: other processes have it, and give it
    back. A call that never fits is a crash, as in a process alone; an oracle that never does has proved nothing.
    """
    for pause in (*pauses, None):
        try:
            checked = check()
            short = any(v.klass == "CRASH" and "OutOfMemoryError" in v.message for v in checked.verdicts)
        except torch.OutOfMemoryError as error:
            said = f"no verdict: the oracle found too little memory ({str(error).splitlines()[0]})"
            verdict = Verdict("call", "NOT_COVERED", 0.0, "memory", said)
            checked, short = Checked(job.problem, job.route, [verdict], proven=False), True
        if not short or pause is None:
            break
        torch.cuda.empty_cache()
        time.sleep(pause)
    return checked


def sound(future: Future) -> bool:
    """Whether a result has come, of a process in which nothing had gone wrong by then."""
    return future.done() and not future.cancelled() and future.exception() is None and not future.result()[1]


def first_done(futures: list[Future]) -> int | None:
    """The place of the first that has ended, or soon does; None if none does: then somebody may look at the clock."""
    wait(futures, timeout=GLANCE, return_when=FIRST_COMPLETED)
    return next((place for place, future in enumerate(futures) if future.done()), None)


class Crew:
    """Processes with a runner each. What kills one costs nothing but time: its tasks are run again, isolated."""

    def __init__(self, settings: Settings, count: int, here: Runner):
        self.settings, self.count, self.here = settings, count, here
        self._pools: dict[bool, ProcessPoolExecutor] = {}  # of the large jobs, and of the others

    def check(self, jobs: Iterable[Job], more: Callable[[], bool]) -> Iterator[Checked]:
        """The result of every job, in order, as long as there are `more` to be had."""
        return (checked for _, checked in self._results(jobs, more, in_order=True))

    def finished(self, jobs: Iterable[Job], more: Callable[[], bool]) -> Iterator[tuple[int, Checked]]:
        """(place of a job, its result) as they finish, as long as there are `more` to be had; what has finished by then
        is not lost.
        """
        return self._results(jobs, more, in_order=False)

    def _results(self, jobs: Iterable[Job], more: Callable[[], bool], in_order: bool) -> Iterator[tuple[int, Checked]]:
        numbered = enumerate(jobs)
        if self.count > 1:
            yield from self._of_processes(deque(numbered), more, in_order)
            return
        for place, job in numbered:
            if not more():
                return
            yield place, _checked(self.here, job, self.settings.seed)

    def _of_processes(
        self, waiting: deque[tuple[int, Job]], more: Callable[[], bool], in_order: bool
    ) -> Iterator[tuple[int, Checked]]:
        large = deque(self._submit(job) for _, job in waiting if job.large)  # at once, in a pool of their own
        running: deque[tuple[int, Job, Future]] = deque()
        while (waiting or running) and more():
            while waiting and len(running) < AHEAD * self.count:
                place, job = waiting.popleft()
                running.append((place, job, large.popleft() if job.large else self._submit(job)))
            turn = 0 if in_order else first_done([future for *_, future in running])
            if turn is None:
                continue
            place, job, future = running[turn]
            del running[turn]
            try:
                checked, poisoned = future.result()
            except BrokenProcessPool:
                checked, poisoned = self._isolated(job), True
            if poisoned:  # no later result of that process means anything
                self.close()
                again = lambda job, future: future if sound(future) else self._submit(job)  # noqa: E731
                running = deque((place, job, again(job, future)) for place, job, future in running)
                behind = (job for _, job in waiting if job.large)
                large = deque(again(job, future) for job, future in zip(behind, large))
            yield place, checked
        if not in_order:
            yield from ((place, future.result()[0]) for place, _, future in running if sound(future))

    def _submit(self, job: Job) -> Future:
        """The job under way; where a process has died meanwhile, it has failed already, as those beside it have."""
        if job.large not in self._pools:
            count = large_at_a_time(self.settings.device) if job.large else self.count
            threads = max(1, torch.get_num_threads() // self.count)
            starting = (self.settings, threads)
            self._pools[job.large] = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start, starting)
        try:
            return self._pools[job.large].submit(_work, job)
        except BrokenProcessPool as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed

    def _isolated(self, job: Job) -> Checked:
        """A job that was under way when a process died, in a child whose death is a result."""
        same = {name: getattr(self.settings, name) for name in ("pin_autotune", "sanitizer", "limits")}
        runner = Runner(self.here.subject, self.settings.device, self.settings.folder, isolated=True, **same)
        try:
            return _checked(runner, job, self.settings.seed)
        finally:
            runner.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        if self._pools:
            for process in multiprocessing.active_children():
                process.terminate()
        self._pools = {}
