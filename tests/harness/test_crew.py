"""Several processes at the same tasks: the same answers in the same order, and a death that costs only time."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from harness.crew import Crew, Job, Settings, processes, sound, with_patience
from harness.families import family
from harness.fitting import fitted
from harness.runner import Checked, Runner
from harness.subject import load_subject
from harness.verdict import Verdict

SUBJECTS = "tests.harness.subjects"


def jobs(*, large: bool = False) -> list[Job]:
    examples = [fitted(example, "chunk-unbounded", "chunk") for example in family("impulse").examples * 2]
    return [
        Job("chunk-unbounded", problem, repeat=False, large=large and i % 2 == 1) for i, problem in enumerate(examples)
    ]


def checked(name: str, count: int, given: list[Job], folder: Path) -> list[Checked]:
    subject = load_subject(name)
    here = Runner(subject, "cpu", folder)
    crew = Crew(Settings(subject.name, "cpu", folder), count, here)
    try:
        return list(crew.check(given, lambda: True))
    finally:
        crew.close()
        here.close()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_processes_say_what_one_process_says(large, tmp_path):
    given = jobs(large=large)
    one, two = (checked("kda", count, given, tmp_path) for count in (1, 2))
    assert [(c.problem, c.verdicts) for c in one] == [(c.problem, c.verdicts) for c in two]
    assert all(v.klass == "OK" for c in two for v in c.verdicts)


def test_a_subject_that_kills_its_process_is_a_result(tmp_path):
    """A foreign subject dies in a child of the process; the process and the order of results survive."""
    given = jobs()
    results = checked(f"{SUBJECTS}:segfault", 2, given, tmp_path)
    assert [c.problem for c in results] == [job.problem for job in given]
    assert {v.klass for c in results for v in c.verdicts} == {"CRASH"}


@pytest.mark.parametrize(
    "asked, tasks, device, foreign, expected",
    [(3, 1, "cpu", False, 3), (None, 5, "cpu", False, 1), (None, 10**4, "cuda", True, 1)],
    ids=["asked", "few", "foreign-gpu"],
)
def test_how_many_processes(asked, tasks, device, foreign, expected):
    assert processes(asked, tasks, device, foreign) == expected


ENDLESS = """
import os, sys, time
from harness.orphans import end_with_parent
child = os.fork()
if not child:
    end_with_parent()
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_what_works_for_a_process_ends_with_it():
    """Killed so that it cannot say goodbye: a pool's workers would wait for ever, and go on with what they have."""
    parent = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(1.0)  # the watch has begun
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not ended(child):
        time.sleep(0.2)
    assert ended(child)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_killed_processes_cost_no_result(large, tmp_path):
    """All die while most jobs have not begun: the pools that they leave take no job, and new ones do."""
    given = jobs(large=large) * 3
    subject = load_subject("kda")
    here = Runner(subject, "cpu", tmp_path)
    crew = Crew(Settings(subject.name, "cpu", tmp_path), 2, here)
    results = crew.check(given, lambda: True)
    try:
        found = [next(results)]
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        found += results
    finally:
        crew.close()
        here.close()
    assert [c.problem for c in found] == [job.problem for job in given]
    assert {v.klass for c in found for v in c.verdicts} == {"OK"}


def future(result: object = None, error: Exception | None = None) -> Future:
    made: Future = Future()
    if error is not None:
        made.set_exception(error)
    elif result is not None:
        made.set_result(result)
    return made


@pytest.mark.parametrize(
    "made, expected",
    [
        (future(("checked", False)), True),
        (future(("checked", True)), False),
        (future(error=BrokenProcessPool()), False),
        (future(), False),
    ],
    ids=["done", "done-after-an-illegal-access", "died", "under-way"],
)
def test_what_is_kept_when_the_processes_start_anew(made, expected):
    assert sound(made) is expected


def test_a_long_job_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    """Results come in order; the jobs behind the first one are under way all the same."""
    under_way = []
    monkeypatch.setattr(Crew, "_submit", lambda self, job: (under_way.append(job), future((job, False)))[1])
    here = Runner(load_subject("kda"), "cpu", tmp_path)
    results = Crew(Settings("kda", "cpu", tmp_path), 2, here).check(jobs() * 20, lambda: True)
    next(results)
    assert len(under_way) == len(jobs() * 20)


def as_they_come(given: list[Job], submitted: list[Future], more: list[bool], folder: Path, monkeypatch) -> list:
    """What a crew finishes whose jobs are these futures, started again ones the last, while there is `more` time."""
    futures, looks = iter(submitted), iter(more)
    monkeypatch.setattr(Crew, "_submit", lambda self, job: next(futures))
    monkeypatch.setattr(Crew, "_isolated", lambda self, job: (job, "isolated"))
    monkeypatch.setattr("harness.crew.GLANCE", 0.01)
    crew = Crew(Settings("kda", "cpu", folder), 2, Runner(load_subject("kda"), "cpu", folder))
    return list(crew.finished(given, lambda: next(looks)))


def test_a_long_job_at_the_end_loses_no_result_of_the_others(tmp_path, monkeypatch):
    given = jobs() * 2
    submitted = [Future(), *(future((job, False)) for job in given[1:])]
    found = as_they_come(given, submitted, [True, False], tmp_path, monkeypatch)
    assert found == [*enumerate(given)][1:]


def test_nothing_that_ends_is_no_reason_to_miss_the_end(tmp_path, monkeypatch):
    assert as_they_come(jobs()[:1], [Future()], [True, True, False], tmp_path, monkeypatch) == []


def test_a_dead_process_costs_no_result_that_has_come(tmp_path, monkeypatch):
    """The first is under way when the process of the second dies: both are run again, what others found is kept."""
    given = jobs() * 2
    died, *sound = (future(error=BrokenProcessPool()), *(future((job, False)) for job in given[2:]))
    again = future((given[0], False))
    found = as_they_come(given, [Future(), died, *sound, again], [True] * 4, tmp_path, monkeypatch)
    assert found == [(1, (given[1], "isolated")), (0, given[0]), (2, given[2]), (3, given[3])]


def test_results_as_they_come_are_those_in_order(tmp_path):
    given = jobs()
    here = Runner(load_subject("kda"), "cpu", tmp_path)
    crew = Crew(Settings("kda", "cpu", tmp_path), 2, here)
    try:
        found = dict(crew.finished(given, lambda: True))
    finally:
        crew.close()
        here.close()
    assert [found[place].verdicts for place in range(len(given))] == [
        one.verdicts for one in checked("kda", 1, given, tmp_path)
    ]


OUT_OF_MEMORY = Verdict("call", "CRASH", float("inf"), "crash", "OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("shortage", ["oracle", "call"])
@pytest.mark.parametrize("short_for, klass", [(2, "OK"), (9, None)], ids=["for-a-while", "for-good"])
def test_too_little_memory_is_waited_for_and_ends_no_run(shortage, short_for, klass):
    job, tries = jobs()[0], []

    def check() -> Checked:
        tries.append(shortage)
        if len(tries) > short_for:
            return Checked(job.problem, job.route, [Verdict("o", "OK", 0.1)])
        if shortage == "oracle":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Checked(job.problem, job.route, [OUT_OF_MEMORY])

    found = with_patience(check, job, pauses=(0.0, 0.0, 0.0))
    assert len(tries) == min(short_for, 3) + 1
    expected = klass or {"oracle": "NOT_COVERED", "call": "CRASH"}[shortage]
    assert [v.klass for v in found.verdicts] == [expected]
    assert found.proven == (expected != "NOT_COVERED")
