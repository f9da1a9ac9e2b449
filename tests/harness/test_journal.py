"""A check that is killed: what it found stays, and a later run goes on where it stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import coverage, journal
from harness.census import Verdict
from harness.check import Task
from harness.problem import Problem
from harness.runner import Checked

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("KDA_TEST_KILLS", "2"))
TASKS = [Task("recurrent", "generic", Problem(lengths=(n,)), True) for n in (1, 2, 3)]
SELECTION = {"routes": "recurrent", "shard": [1, 2]}


def checked(task: Task, ratio: float = 0.5) -> Checked:
    verdicts = [Verdict("o", "OK", ratio, "element", "said")]
    return Checked(task.problem, task.route, verdicts, 1.0, 2.0, 3.0, 4, True, missing=frozenset({"dg", "dq"}))


def written(folder: Path, count: int) -> journal.Journal:
    made = journal.Journal(folder, TASKS, SELECTION, "cpu")
    for task in TASKS[:count]:
        made.add(checked(task))
    return made


def test_what_is_done_comes_back_and_no_more(tmp_path):
    written(tmp_path, 2)
    assert journal.selection_of(tmp_path) == SELECTION
    assert journal.Journal(tmp_path, TASKS, SELECTION, "cpu").past == [checked(task) for task in TASKS[:2]]


@pytest.mark.parametrize("lost", [1, 20, 60], ids=lambda lost: f"{lost}_bytes")
def test_a_line_that_was_cut_off_is_not_done_and_spoils_nothing(tmp_path, lost):
    path = written(tmp_path, 2).path
    path.write_bytes(path.read_bytes()[:-lost])
    again = journal.Journal(tmp_path, TASKS, SELECTION, "cpu")
    done = 2 if lost == 1 else 1  # only the end of the line is gone, or the line is
    assert again.past == [checked(task) for task in TASKS[:done]]
    again.add(checked(TASKS[done], 0.25))
    assert journal.Journal(tmp_path, TASKS, SELECTION, "cpu").past[done] == checked(TASKS[done], 0.25)


def test_infinite_and_missing_ratios_come_back(tmp_path):
    made = journal.Journal(tmp_path, TASKS, SELECTION, "cpu")
    made.add(checked(TASKS[0], float("inf")))
    assert journal.Journal(tmp_path, TASKS, SELECTION, "cpu").past[0].verdicts[0].ratio == float("inf")


def test_another_plan_is_refused(tmp_path):
    written(tmp_path, 1)
    with pytest.raises(ValueError, match="a run of other problems"):
        journal.Journal(tmp_path, TASKS[::-1], SELECTION, "cpu")


def test_another_machine_is_refused(tmp_path):
    path = written(tmp_path, 1).path
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    with pytest.raises(ValueError, match="NVIDIA H200"):
        journal.Journal(tmp_path, TASKS, SELECTION, "cpu")


@pytest.mark.parametrize("text", [None, "", "nonsense", '{"schema": 1}'], ids=["none", "empty", "no_json", "no_run"])
def test_a_folder_without_a_run_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / journal.NAME).write_text(text)
    with pytest.raises(ValueError, match="resume is"):
        journal.selection_of(tmp_path)


PROGRAM = """
import dataclasses, sys
from harness import cli, profiles
profiles.PROFILES["dev"] = dataclasses.replace(profiles.PROFILES["dev"], shrink_seconds=0.0)
sys.exit(cli.main(sys.argv[1:]))
"""


def check(folder: Path, *more: str) -> subprocess.Popen:
    """`kda check` on a wrong subject, which leaves its problems as they were found."""
    command = [sys.executable, "-c", PROGRAM, "check", *more, "--report", "report", "--json", "out.json"]
    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | given, start_new_session=True, **quiet)


def result(folder: Path) -> tuple[dict, set]:
    """Counts, ratios and classes by row; the findings."""
    document = json.loads((folder / "out.json").read_text())
    keys = ("problems", "worst_ratio", "class")
    rows = {
        tuple(row[name] for name in ("route", "quantity", "family")): [row[k] for k in keys]
        for row in document["routes"]
    }
    return rows, {(f["route"], f["quantity"], f["class"]) for f in document["findings"]}


def test_a_check_that_is_killed_at_random_loses_nothing(tmp_path):
    subject = ("--subject", "tests.harness.subjects:wrong", "--routes", "chunk-unbounded")
    asked = (*subject, "--families", "ragged", "--jobs", "1")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.mkdir()
    pieces.mkdir()
    said = check(whole, *asked).communicate(timeout=300)[0]
    expected = result(whole)
    assert expected[1], said
    rng, arguments, known = random.Random(0), asked, set()
    for _ in range(KILLS):
        running = check(pieces, *arguments)
        time.sleep(rng.uniform(3, 9))
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        runs = sorted((pieces / "report").glob("2*")) if (pieces / "report").is_dir() else []
        found = {path.parent.name for run in runs for path in run.glob("*/problem.json")}
        assert known <= found, "a counterexample that was on disk is gone"
        known = found
        if runs and (runs[0] / journal.NAME).exists():
            arguments = ("--resume", f"report/{runs[0].name}")
    running = check(pieces, *arguments)
    said = running.communicate(timeout=300)[0]
    assert running.returncode == 1, said
    assert result(pieces) == expected


def test_coverage_names_what_was_met_and_what_was_not():
    problem = Problem(lengths=(0, 16, 20), packed=True, tail=3, group=2, K=6, V=6, dtype="bf16", g="resets")
    assert {
        "packed",
        "tail",
        "GVA",
        "length 0",
        "length 16",
        "bf16",
        "g resets",
        "K not a power of two",
    } <= coverage.met(problem)
    assert not {"length 20", "K != V", "batch", "l2norm"} & coverage.met(problem)
    counts = coverage.Counter(coverage.met(Problem()))
    first, second = coverage.shown(counts, coverage.everything([Problem(), problem]))
    assert "length 1 1" in first and "fp32 1" in first
    assert second.startswith("not met: ") and "g resets" in second and "fp32" not in second.split(", ")
