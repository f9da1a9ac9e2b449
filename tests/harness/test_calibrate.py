"""`kda calibrate`: what correct kernels come to is kept, by platform, added up and moved by a larger error."""

import argparse
import itertools
from dataclasses import replace

import pytest

from harness import calibrate, calibration
from harness.calibration import Row, Seen, Table
from harness.calibration_round import (
    WIDE,
    WIDE_ELEMENTS,
    WIDE_HEADS,
    WIDE_ROWS,
    Choice,
    elements_of,
    rows_of,
    widened,
)
from harness.cli import main
from harness.crew import Crew
from harness.problem import Problem, materialise
from harness.subject import load_subject
from oracle.operator import evaluate, evaluate_gate

SUBJECTS = "tests.harness.subjects"
ROUTE = "chunk-unbounded"
GATES = ("safe_gate", "unbounded")


def run(folder, subject, *arguments) -> int:
    words = ["calibrate", "--device", "cpu", "--jobs", "1", "--subject", f"{SUBJECTS}:{subject}"]
    words += [
        "--routes",
        ROUTE,
        "--families",
        "impulse",
        "--table",
        str(folder / "table.json"),
        "--report",
        str(folder),
    ]
    return main([*words, *arguments])


def row(folder, subject) -> Row:
    return Table(folder / "table.json").rows[f"{SUBJECTS}:{subject}", calibration.platform("cpu")]


def test_what_was_seen_is_kept_and_a_later_run_adds_fresh_problems(tmp_path, capsys):
    assert run(tmp_path, "right", "--elements", "200", "--budget", "5m") == 0
    first, counts = row(tmp_path, "right"), row(tmp_path, "right").elements()
    assert {route for route, _ in counts} == {ROUTE} and all(count >= 200 for count in counts.values())
    assert set(first.cells) >= {(ROUTE, "bf16", "o"), (ROUTE, "fp32", "dg")} and first.findings == []
    assert all(0 < seen.ratio <= 1 for cell in first.cells for seen in [first.pooled(cell)] if cell[2] == "o")
    wanted = 2 * max(counts.values())
    assert run(tmp_path, "right", "--elements", str(wanted), "--budget", "5m") == 0
    again = row(tmp_path, "right")
    assert again.rounds[0] > first.rounds[0] and again.problems > first.problems
    assert all(again.pooled(cell).z >= seen.z for cell in first.cells for seen in [first.pooled(cell)])
    assert "0 findings" in capsys.readouterr().out


def test_a_larger_error_moves_the_figures_and_is_a_finding(tmp_path, capsys):
    assert run(tmp_path, "right", "--elements", "200", "--budget", "5m") == 0
    assert run(tmp_path, "wrong", "--elements", "200", "--budget", "5m") == 1
    right, wrong = (row(tmp_path, name) for name in ("right", "wrong"))
    for dtype in ("fp16", "fp32"):  # in bf16 one part in a hundred is rounding
        cell = (ROUTE, dtype, "o")
        assert wrong.pooled(cell).ratio > 1 >= right.pooled(cell).ratio
        assert wrong.pooled(cell).z > right.pooled(cell).z
    assert any("o: BUG" in found["found"] and found["route"] == ROUTE for found in wrong.findings)
    assert "FOUND" in capsys.readouterr().out and list(tmp_path.glob("*/chunk-unbounded-o-bug-*/problem.json"))


def choice(device: str) -> Choice:
    return Choice(load_subject("kda"), "*", "*", device)


def test_every_round_has_problems_of_its_own():
    chosen = choice("cpu")
    rounds = [[task.problem for task in chosen.round(number, 0)] for number in (0, 1)]
    assert not set(rounds[0]) & set(rounds[1]) and rounds[0] == [task.problem for task in chosen.round(0, 0)]


KINDS = {(route, dtype) for route in ("recurrent", "decode", "gate", "torch") for dtype in ("bf16", "fp32", "fp16")}
KINDS |= {(f"chunk-{gates}", dtype) for gates in GATES for dtype in ("bf16", "fp32", "fp16", "fp32-tf32")}
KINDS |= {(f"{name}-{gates}", "bf16") for gates in GATES for name in ("fused", "segment_parallel")}
KINDS |= {("recurrent", "fp32-tf32"), ("torch", "fp32-tf32")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_round_begins_with_every_route_in_every_dtype(number, device):
    tasks = choice(device).round(number, 0)
    assert {task.kind for task in tasks[: len(KINDS)]} == KINDS == {task.kind for task in tasks}


def test_on_a_gpu_some_problems_of_each_route_and_dtype_have_many_heads():
    tasks = [task for number in (0, 1) for task in choice("cuda").round(number, 0)]
    wide = {kind: [task.widened().problem for task in tasks if task.wide and task.kind == kind] for kind in KINDS}
    assert all(WIDE < len(problems) <= 2 * WIDE for problems in wide.values())
    assert all(sum(map(elements_of, problems)) > 1e6 for problems in wide.values())
    assert all(task.widened() == task for task in tasks if not task.wide) and len(tasks) > 1000
    assert not any(task.wide for task in choice("cpu").round(0, 0))


BASE = Problem(lengths=(66,), heads=2, group=2, K=64, V=64, initial_state=True)


@pytest.mark.parametrize(
    "problem, heads",
    [
        (BASE, 8),  # 100,616 elements 4 times, of 800,000
        (replace(BASE, entry="chunk"), 8),  # 32,768 rows of 2 chunks 4 times, of 200,000
        (replace(BASE, entry="chunk", lengths=(1, 1, 1, 1), packed=True), 4),
        (replace(BASE, lengths=(0,), K=1, V=1), 512),  # 1,024 value heads
        (replace(BASE, lengths=(2000,), heads=3), 3),  # large as it is
        (Problem(entry="gate", lengths=(66,), heads=3, K=64, gate="softplus", A_log="zeros"), 3 * 16),
    ],
    ids=["elements", "rows", "begun-chunks", "heads", "large", "gate"],
)
def test_a_wide_problem_differs_in_heads_only_and_keeps_the_limits(problem, heads):
    wide = widened(problem)
    assert wide == replace(problem, heads=heads)
    twice = replace(wide, heads=2 * wide.heads)
    within = elements_of(twice) <= WIDE_ELEMENTS and rows_of(twice) <= WIDE_ROWS and twice.value_heads <= WIDE_HEADS
    assert not within


@pytest.mark.parametrize(
    "problem",
    [
        replace(BASE, gate="softplus", A_log="zeros", dt_bias="zeros", g="gauss"),
        replace(BASE, loss="none", lengths=(3, 0, 5), packed=True),
        replace(BASE, entry="chunk", lengths=(33, 0, 32), packed=True, intermediates=True, chunk_size=32),
        Problem(entry="gate", lengths=(5,), K=4, heads=2, gate="softplus", A_log="zeros", dt_bias="zeros", g="gauss"),
    ],
    ids=["gradients", "forward", "intermediates", "gate"],
)
def test_elements_are_those_that_the_oracle_returns(problem):
    case = materialise(replace(problem, K=4, V=3 if problem.entry != "gate" else 1))
    evaluated = (evaluate_gate if problem.entry == "gate" else evaluate)(case.inputs, case.options)
    expected = sum(evaluated[name].numel() for name in case.problem.quantities())
    assert elements_of(case.problem) == expected


def test_it_goes_on_until_there_are_problems_enough_too(tmp_path, capsys):
    assert run(tmp_path, "right", "--elements", "1", "--problems", "11", "--budget", "5m") == 0
    assert row(tmp_path, "right").problems >= 11 and row(tmp_path, "right").rounds[0] > 1
    assert "of 11 problems, 0 findings; least: chunk-unbounded " in capsys.readouterr().out
    assert run(tmp_path, "right", "--elements", "1", "--problems", "1000", "--budget", "0.01s") == 3
    assert "of 1000 problems" in capsys.readouterr().out.splitlines()[-1]


def test_less_than_was_asked_for_is_said(tmp_path, capsys):
    assert run(tmp_path, "right", "--elements", "1e9", "--budget", "0.01s") == 3
    assert f"too few: {ROUTE} bf16" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_seen(tmp_path, monkeypatch, capsys):
    finished = Crew.finished

    def interrupted(crew, jobs, more):
        yield from itertools.islice(finished(crew, jobs, more), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Crew, "finished", interrupted)
    assert run(tmp_path, "right", "--elements", "1e9") == 3
    assert row(tmp_path, "right").problems == 3 and row(tmp_path, "right").rounds == {0: 1}


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e", ""])
def test_elements_are_a_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number from 1, as in 1e7"):
        calibrate.elements(text)


class TestTable:
    def test_is_read_as_it_was_written(self, tmp_path):
        table = Table(tmp_path / "table.json")
        seen = table.row("kda", "sm_90, torch 2.11.0, triton 3.6.0")
        seen.add(("recurrent", "bf16", "o"), "generic", Seen(2.5, 0.5, "row", 100, 2))
        seen.add(("recurrent", "bf16", "o"), "generic", Seen(1.5, 0.75, "block", 10, 1))
        seen.add(("recurrent", "bf16", "o"), "ragged", Seen(float("inf"), 0.25, "element", 1, 1))
        seen.rounds[7], seen.problems = 2, 3
        table.save()
        again = Table(tmp_path / "table.json").rows["kda", "sm_90, torch 2.11.0, triton 3.6.0"]
        assert again == seen and again.cells["recurrent", "bf16", "o"]["generic"] == Seen(2.5, 0.75, "block", 110, 3)
        assert again.pooled(("recurrent", "bf16", "o")) == Seen(float("inf"), 0.75, "block", 111, 4)

    def test_keeps_the_rows_of_others(self, tmp_path):
        path = tmp_path / "table.json"
        for where in ("sm_90", "sm_100"):
            table = Table(path)
            table.row("kda", where).problems = 1
            table.save()
        assert {where for _, where in Table(path).rows} == {"sm_90", "sm_100"}

    @pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{}]}'])
    def test_another_file_is_refused(self, tmp_path, text):
        path = tmp_path / "table.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"table is .*; it must be one that `kda calibrate` wrote"):
            Table(path)

    def test_the_committed_one_is_a_table(self):
        rows = Table().rows
        assert rows and all(row.problems > 100 for row in rows.values())
        assert all(subject == "kda" and "torch" in where for subject, where in rows)


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_a_check_says_in_one_line_that_its_platform_has_no_row(known, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "TABLE", tmp_path / "table.json")
    if known:
        table = Table(tmp_path / "table.json")
        table.row("kda", calibration.platform("cpu")).problems = 1
        table.save()
    words = ["check", "--device", "cpu", "--report", str(tmp_path), "--routes", "torch", "--families", "impulse"]
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not calibrated" in line]
    assert len(lines) == (0 if known else 1) and all("interpreter, torch" in line for line in lines)
