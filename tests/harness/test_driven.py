"""Generated problems that follow the worst ratios, resumed where they were; and Ctrl-C, once and twice."""

import itertools
import json
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from harness import check, cli, interrupts
from harness.driven import Driver, driven, heights
from harness.families import FAMILIES, family
from harness.journal import Journal
from harness.problem import Problem
from harness.profiles import PROFILES, Profile, drawing
from harness.results import Report
from harness.runner import Checked
from harness.subject import load_subject
from harness.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
COUNT = 300


def problem_of(length: int, K: int) -> Problem:
    return Problem(lengths=(length,), K=K)


PROBLEMS = st.builds(problem_of, st.integers(0, 1000), st.integers(1, 256))


def ratio(problem: Problem) -> float:
    """A narrow ridge, which chance does not climb."""
    return 1 / (1 + abs(problem.lengths[0] - 777) + abs(problem.K - 200))


def result(problem: Problem) -> Checked:
    return Checked(problem, "recurrent", [Verdict("o", "OK", ratio(problem))])


def searched(driver: Driver, count: int = 10**9) -> list[Problem]:
    """The problems that a search makes."""
    each = driven([driver], 1, lambda tasks: map(result, tasks))
    return [problem for problem, _ in itertools.islice(each, count)]


def driver(seed: int = 0) -> Driver:
    return Driver(PROBLEMS, lambda problem: problem, COUNT, seed)


def test_a_search_climbs_where_chance_does_not():
    drawn = []

    @hypothesis.seed(0)
    @drawing(COUNT)
    @hypothesis.given(PROBLEMS)
    def collect(problem):
        drawn.append(problem)

    collect()
    found = searched(driver())
    assert len(found) == len(set(found)) <= COUNT
    assert max(map(ratio, found)) > 3 * max(map(ratio, drawn))


def test_the_same_ratios_make_the_same_search():
    assert searched(driver(3)) == searched(driver(3)) != searched(driver(4))


def test_what_is_wrong_or_infinite_does_not_lead_a_search():
    verdicts = [
        Verdict("o", "OK", 0.5),
        Verdict("o", "OK", 0.25),
        Verdict("ht", "BUG", 7.0),
        Verdict("dq", "OK", float("inf")),
        Verdict("dk", "UNINFORMATIVE", 0.75),
    ]
    assert heights(Checked(Problem(), "recurrent", verdicts)) == {"o": 0.5}


def test_several_searches_go_on_side_by_side_until_the_time_is_up():
    asked: list[Problem] = []
    names: Counter[str] = Counter()

    def tasks(name: str) -> Driver:
        return Driver(PROBLEMS, lambda problem: (name, problem), 5, 0)

    def answered(batch):
        asked.extend(batch)
        return itertools.islice((result(problem) for _, problem in batch), max(0, 12 - sum(names.values())))

    for (name, _), _ in driven(map(tasks, "abcd"), 3, answered):
        names[name] += 1
    assert sum(names.values()) == 12 and names["a"] + names["b"] + names["c"] >= 9
    assert len(asked) - 12 <= 3


def test_a_search_without_problems_ends():
    assert searched(Driver(PROBLEMS, lambda problem: None, COUNT, 0)) == []


def test_only_long_profiles_search():
    subject = load_subject("tests.harness.subjects:right")
    short, long = (check.searches(subject, PROFILES[name], "*unbounded", "*", "cpu", 0) for name in ("ci", "nightly"))
    assert short == {}
    keys = {
        ("chunk-unbounded", "chunk", each.name) for each in FAMILIES if not each.gpu_only and "chunk" in each.entries
    }
    assert keys == set(long)
    weight = family("generic").weight
    assert long["chunk-unbounded", "chunk", "generic"].count == PROFILES["nightly"].driven * weight


LITTLE = Profile("sweep", 1, 600.0, 0.0, driven=3)
ASKED = (
    "--subject",
    "tests.harness.subjects:right",
    "--routes",
    "*unbounded",
    "--families",
    "ragged",
    "--profile",
    "sweep",
    "--jobs",
    "1",
)


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """`kda check` of a right subject, with a few problems and a search."""
    monkeypatch.setitem(PROFILES, "sweep", LITTLE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the child, which starts in that folder
    monkeypatch.chdir(tmp_path)

    def run(*more: str) -> tuple[int, dict]:
        status = cli.main(["check", *ASKED, "--json", "out.json", *more])
        return status, json.loads((tmp_path / "out.json").read_text())

    return run


def test_a_sweep_searches_and_goes_on_where_it_was(sweep, tmp_path, monkeypatch):
    status, document = sweep()
    assert status == 0
    (folder,) = tmp_path.glob("report/2*")
    lines = (folder / "journal.jsonl").read_text().splitlines()
    made = [json.loads(line)["driven"] for line in lines if "driven" in json.loads(line)]
    assert made and {tuple(line[:2]) for line in made} == {("chunk-unbounded", "ragged")}
    assert document["coverage"]["planned"] == len(lines) - 1 == document["coverage"]["checked"]

    (folder / "journal.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    ran = []
    checked = check.Crew.check
    monkeypatch.setattr(check.Crew, "check", lambda *args: map(lambda c: ran.append(c) or c, checked(*args)))
    assert sweep("--resume", str(folder))[1]["coverage"]["checked"] == len(lines) - 1
    assert [one.problem for one in ran] == [Problem.from_json(made[-1][2])]


@pytest.mark.parametrize("times", [1, 2])
def test_control_c_leaves_results(sweep, tmp_path, monkeypatch, capfd, times):
    """The first one while a problem is journalled, the second one while results are written."""
    journalled, finished = Journal.add, Report.finish

    def add(self, *args):
        journalled(self, *args)
        signal.raise_signal(signal.SIGINT)

    def finish(self, *args):
        if times == 2:
            signal.raise_signal(signal.SIGINT)
        finished(self, *args)

    monkeypatch.setattr(Journal, "add", add)
    monkeypatch.setattr(Report, "finish", finish)
    before = signal.getsignal(signal.SIGINT)  # ignored in what a script started in the background
    status, document = sweep()
    said = capfd.readouterr()
    assert (status, document["coverage"]["checked"]) == (3, 1)
    assert "interrupted; what was found is kept" in said.out
    assert ("results are being written" in said.err) == (times == 2)
    assert len((tmp_path / "report" / "results.jsonl").read_text().splitlines()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_whoever_insists_leaves_at_once():
    with interrupts.handled() as stop:
        stop.finishing()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
