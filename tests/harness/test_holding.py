"""`kda_hold` inside pytest: the five lines, the example to paste, JUnit properties, the summary of a GitHub run."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.holding import NotHeld, WrongResult, hold
from harness.problem import Problem
from harness.report import step_summary
from harness.runner import Runner
from harness.subject import load_subject

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = "tests.harness.subjects"
PROBLEM = Problem(entry="chunk", lengths=(2, 3), packed=True)
TESTS = f"""
import pytest
from hypothesis import Phase, given, settings, strategies as st
from harness.problem import Problem

def test_fails(kda_hold):
    kda_hold("chunk-unbounded", {PROBLEM!r})

def test_right(kda_hold):
    kda_hold("chunk-unbounded", Problem(entry="chunk", lengths=(2,)))

@settings(max_examples=5, database=None, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(length=st.integers(1, 9))
def test_property(kda_hold, length):
    kda_hold("chunk-unbounded", Problem(entry="chunk", lengths=(1, length), packed=True))
"""


def runner(subject: str, tmp_path: Path) -> Runner:
    return Runner(load_subject(f"{SUBJECTS}:{subject}"), "cpu", tmp_path, isolated=False)


def pytest_of(folder: Path) -> str:
    """What pytest prints of three tests on a subject that leaks between sequences."""
    (folder / "test_it.py").write_text(TESTS)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"),
        *("--rootdir", str(folder), "--junitxml", "junit.xml", "--kda-report", "report", "--kda-device", "cpu"),
        *("--kda-subject", f"{SUBJECTS}:leaky", "test_it.py"),
    ]
    given = {"TRITON_INTERPRET": "1", "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=environment | given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_session_that_fails_says_why_and_where_to_look(tmp_path):
    shown = pytest_of(tmp_path)
    assert "2 failed, 1 passed" in shown
    assert (
        "what   BUG: " in shown
        and "needs  right with one sequence less (the last), one sequence less (the first)" in shown
    )
    assert f"@example({PROBLEM!r})" in shown
    assert "@example(Problem(entry='chunk', lengths=(1, 1), packed=True))" in shown  # as Hypothesis shrank it
    pages = list(tmp_path.glob("report/*/*/report.html"))
    assert len(pages) == 2 and all(str(page.parent.relative_to(tmp_path)) in shown for page in pages)

    cases = ElementTree.parse(tmp_path / "junit.xml").iter("testcase")
    found = {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases}
    assert found["test_right"] == {}
    assert (tmp_path / found["test_fails"]["kda_report"] / "problem.json").is_file()
    assert found["test_fails"]["kda_example"] == f"@example({PROBLEM!r})"
    assert found["test_fails"]["kda_lines"].startswith("what   BUG: ")

    text = (tmp_path / "summary.md").read_text()
    titles = [line.split("::")[1] for line in text.splitlines() if line.startswith("###")]
    assert titles == ["test_fails", "test_property"]
    assert text.count("where  sequence 1 of 2") == 2 and f"@example({PROBLEM!r})" in text


def test_a_summary_that_cannot_be_written_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    step_summary.append(["text"])
    assert "could not be written" in capsys.readouterr().err


def test_degrees_of_failure_are_raised_from_lines_of_their_own(tmp_path):
    """So that Hypothesis does not shrink a gross failure until it is marginal."""
    lines = set()
    for subject, problem in (("leaky", PROBLEM), ("wrong", Problem(entry="chunk", lengths=(3,)))):
        with pytest.raises(WrongResult) as caught:
            hold(runner(subject, tmp_path), "chunk-unbounded", problem)
        lines.add(caught.traceback[-1].lineno)
    assert len(lines) == 2


def test_what_was_not_compared_is_no_pass(tmp_path):
    with pytest.raises(NotHeld, match="takes safe_gate problems"):
        hold(runner("right", tmp_path), "chunk-safe_gate", PROBLEM)
