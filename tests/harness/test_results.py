"""What a run leaves behind: on disk at once, smaller ones in place, and printed where there is no disk."""

import json
import math
import os
from dataclasses import replace

import pytest

from harness.check import Checks, Task
from harness.isolate import StorageError, write_ahead
from harness.problem import Edit, Problem
from harness.results import Finding, Report, Row, document, environment
from harness.runner import Checked
from harness.verdict import Verdict

PROBLEM = Problem(lengths=(3,), K=2, edits=(Edit("g", (0, 0, 1), -math.inf),))
BUG = Verdict("dk", "BUG", 31.5, "element", "half of it")


def test_a_finding_is_on_disk_and_replaced_by_a_smaller_one(tmp_path):
    report = Report(tmp_path)
    finding = report.save(Finding.of("recurrent", BUG, PROBLEM))
    path = tmp_path / report.folder.name / finding.id / "problem.json"
    assert finding.path == str(path)
    assert Problem.load(path) == PROBLEM
    found = json.loads(path.read_text())["found"]
    assert (found["route"], found["quantity"], found["class"], found["ratio"]) == ("recurrent", "dk", "BUG", 31.5)
    again = report.save(replace(finding, problem=Problem()))
    assert again.path == finding.path and Problem.load(path) == Problem()
    assert eval(json.loads(path.read_text())["found"]["original"]) == PROBLEM
    assert [file.name for file in path.parent.iterdir()] == ["problem.json"]


def test_a_finding_that_cannot_be_written_is_printed(tmp_path, capsys):
    report = Report(tmp_path)
    report.folder.write_text("a file where the folder should be")
    finding = report.save(Finding.of("recurrent", BUG, PROBLEM))
    assert finding.path == ""
    said = capsys.readouterr().err
    assert "could not be written" in said
    assert Problem.from_json(said[said.index("{") :]) == PROBLEM


def test_nothing_is_launched_without_its_record(tmp_path):
    (tmp_path / "inflight").write_text("")
    with pytest.raises(StorageError, match="nothing is launched"):
        write_ahead(tmp_path / "inflight", "chunk", PROBLEM)


def test_results_are_appended_as_strict_json(tmp_path):
    row = Row("recurrent", "dk", "generic")
    row.add(Verdict("dk", "OK", 0.4))
    row.add(Verdict("dk", "UNINFORMATIVE", 0.1))
    row.add(Verdict("dk", "CRASH", math.inf))
    finding = Finding.of("recurrent", BUG, PROBLEM)
    result = document(environment("cpu"), "kda 1", 0, [row], [finding], {"checked": 1})
    report, extra = Report(tmp_path), tmp_path / "deep" / "result.json"
    report.prepare()
    report.finish(result, extra)
    report.finish(result, None)
    strict = lambda text: json.loads(text, parse_constant=pytest.fail)  # noqa: E731
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [strict(line) for line in lines] == [strict(extra.read_text())] * 2
    (shown,) = strict(lines[0])["routes"]
    assert (shown["problems"], shown["worst_ratio"], shown["class"], shown["uninformative"]) == (3, "inf", "CRASH", 1)
    assert strict(lines[0])["findings"][0]["problem"]["edits"][0]["value"] == "-inf"


def test_results_that_cannot_be_written_are_printed(tmp_path, capsys):
    report = Report(tmp_path)
    os.mkdir(tmp_path / "results.jsonl")
    with pytest.raises(StorageError):
        report.finish({"schema": 1}, None)
    assert capsys.readouterr().err.startswith('{"schema": 1}')


TASK = Task("recurrent", "generic", PROBLEM, required=True)
NOTHING = Verdict("call", "NOT_COVERED", 0.0, "not_covered", "has no argument")


@pytest.mark.parametrize(
    "verdicts, changes, status",
    [
        ([Verdict("o", "OK", 0.1)], {}, 0),
        ([Verdict("o", "OK", 0.1)], {"required_left": 1}, 3),
        ([NOTHING], {}, 3),
        ([Verdict("o", "OK", 0.1), Verdict("h", "NOT_COVERED", 0.0, message="not returned")], {}, 3),
        ([Verdict("o", "OK", 0.1)], {"findings": {"x": Finding.of("recurrent", BUG, PROBLEM)}, "required_left": 1}, 1),
    ],
    ids=["right", "required_left", "nothing_ran", "quantity_missing", "finding"],
)
def test_exit_status(verdicts, changes, status):
    checks = Checks(**changes)
    checks.record(TASK, Checked(PROBLEM, "recurrent", verdicts))
    assert checks.exit_status() == status


def test_a_route_that_did_not_run_is_no_pass():
    checks = Checks()
    checks.record(TASK, Checked(PROBLEM, "recurrent", [Verdict("o", "OK", 0.1)]))
    checks.record(TASK, Checked(PROBLEM, "recurrent", [NOTHING], proven=False))
    assert checks.exit_status() == 3
