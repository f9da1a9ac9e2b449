"""Several processes at the same tasks: the same answers in the same order, and a death that costs only time."""

from pathlib import Path

import pytest

from harness.check import fitted
from harness.crew import Crew, Job, Settings, processes
from harness.families import family
from harness.runner import Checked, Runner
from harness.subject import load_subject

SUBJECTS = "tests.harness.subjects"


def jobs(*, alone: bool = False) -> list[Job]:
    examples = [fitted(example, "chunk-unbounded", "chunk") for example in family("impulse").examples * 2]
    return [Job("chunk-unbounded", problem, repeat=False, alone=alone) for problem in examples]


def checked(name: str, count: int, given: list[Job], folder: Path) -> list[Checked]:
    subject = load_subject(name)
    here = Runner(subject, "cpu", folder)
    crew = Crew(Settings(subject.name, "cpu", folder), count, here)
    try:
        return list(crew.check(given, lambda: True))
    finally:
        crew.close()
        here.close()


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
def test_processes_say_what_one_process_says(alone, tmp_path):
    given = jobs(alone=alone)
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
