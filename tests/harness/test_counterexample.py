"""`kda replay`, `minimise` and `compare`: one counterexample, any subject, and files that nobody should trust."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main
from harness.problem import Problem

SUBJECTS = "tests.harness.subjects"
PROBLEM = Problem(entry="chunk", lengths=(4, 3), packed=True, tail=1, heads=2, K=2, V=2, v="ramp", q="ramp", g="slow")


def stored(tmp_path: Path, problem: Problem = PROBLEM, **found: str) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(problem.to_json(found))
    return path


def kda(tmp_path: Path, *arguments: object) -> int:
    return main([*map(str, arguments), "--device", "cpu", "--report", str(tmp_path / "report")])


def test_minimise_ends_at_what_the_fault_needs(tmp_path, capsys):
    """A leak into the last head of the next sequence needs two sequences and one value that the first one leaves."""
    path = stored(tmp_path, route="chunk-unbounded", quantity="ht", **{"class": "BUG"})
    assert kda(tmp_path, "minimise", tmp_path, "--subject", f"{SUBJECTS}:leaky", "--budget", "60s") == 1
    shown = capsys.readouterr().out
    assert "what   BUG: ht of chunk-unbounded" in shown and "where  sequence 1 of 2" in shown
    (made,) = (tmp_path / "report").glob("*/chunk-unbounded-ht-*/problem.json")
    small = Problem.load(made)
    assert (len(small.lengths), sum(small.lengths), small.value_heads, small.K, small.V) == (2, 1, 1, 1, 1)
    assert len(small.edits) <= 4 and {edit.value for edit in small.edits} <= {1.0, 0.0}
    assert Problem.load(path) == PROBLEM
    assert {file.name for file in made.parent.iterdir()} >= {"report.html", "report.md", "reproduce.py"}


def test_minimise_of_what_is_right_says_so(tmp_path, capsys):
    stored(tmp_path)
    assert kda(tmp_path, "minimise", tmp_path, "--subject", f"{SUBJECTS}:right") == 0
    assert "right on this problem" in capsys.readouterr().out


def test_compare_puts_subjects_side_by_side(tmp_path, capsys):
    stored(tmp_path)
    subjects = f"{SUBJECTS}:right,{SUBJECTS}:leaky"
    assert kda(tmp_path, "compare", tmp_path, "--subjects", subjects, "--routes", "chunk-unbounded") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "chunk-" in line]
    assert "BUG" not in lines[0] and "OK" in lines[0]
    assert "BUG" in lines[1]
    right = f"{SUBJECTS}:right"
    assert kda(tmp_path, "compare", tmp_path, "--subjects", right, "--routes", "chunk-safe_gate") == 3
    assert "not covered" in capsys.readouterr().out


def test_replay_traces_stages_where_there_are_any(tmp_path, capsys):
    stored(tmp_path, replace(PROBLEM, lengths=(2,), packed=False, tail=0))
    subject = f"{SUBJECTS}:staged"
    assert kda(tmp_path, "replay", tmp_path, "--subject", subject, "--stage-trace", "--routes", "chunk-unbounded") == 0
    shown = capsys.readouterr().out
    assert "stages of chunk-unbounded" in shown
    assert [name for name in ("q_decayed", "inverse", "v_new", "dh", "dA_kk") if name not in shown] == []
    assert kda(tmp_path, "replay", tmp_path, "--subject", f"{SUBJECTS}:right", "--stage-trace") == 0
    assert "no stage trace: exposes no intermediates" in capsys.readouterr().out


def text_of(**changes: object) -> str:
    document = json.loads(PROBLEM.to_json())
    document["problem"] |= changes
    return json.dumps(document)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "cannot be read"),
        (PROBLEM.to_json()[:200], "cannot be read"),
        ("\x80\x81", "problem JSON cannot be read"),
        (text_of(q="__import__('os').system('true')"), "Problem.q is"),
        (text_of(lengths=[2**20], K=256, V=256, heads=64), "few enough for q"),
        ("{" * 100_000, "cannot be read"),
        (" " * (2**20 + 1), "a problem has at most"),
        (text_of().replace('"found": {}', '"found": {"class": "os", "route": 1, "quantity": []}'), "found is"),
    ],
    ids=["empty", "truncated", "binary", "hostile", "huge_problem", "deep", "huge_file", "hostile_found"],
)
def test_a_file_that_is_no_problem_is_refused_and_nothing_runs(text, complaint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.counterexample.load_subject", lambda name: pytest.fail("a subject was loaded"))
    (tmp_path / "problem.json").write_text(text)
    assert kda(tmp_path, "minimise", tmp_path) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.startswith("kda: ") and len(said) < 1000
    assert not os.path.exists(tmp_path / "report")


def test_a_problem_that_does_not_fit_this_machine_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.counterexample.COPIES", 2**50)
    stored(tmp_path)
    assert kda(tmp_path, "replay", tmp_path) == 2
    assert "GiB; this machine has" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nowhere", "."], ids=["missing", "folder_without_one"])
def test_a_path_without_a_problem_is_refused(path, tmp_path, capsys):
    assert kda(tmp_path, "replay", tmp_path / path) == 2
    assert "it must be an existing problem.json" in capsys.readouterr().err


def test_no_subject_is_no_comparison(tmp_path, capsys):
    stored(tmp_path)
    assert kda(tmp_path, "compare", tmp_path, "--subjects", ",") == 2
    assert "subjects is ','" in capsys.readouterr().err
