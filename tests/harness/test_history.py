"""`kda history`: what changed in the newest run, between which versions, and what cannot be read."""

import json

import pytest

from harness import cli
from harness.history import Run, by_place, changes
from harness.results import RESULTS, Row, document


def result(version: str, *rows: tuple[str, str, float], device: str = "cpu", **env) -> dict:
    """A run of `kda VERSION` with (quantity, class, worst ratio) on the recurrent route."""
    made = [Row("recurrent", quantity, "generic", 3, ratio, klass) for quantity, klass, ratio in rows]
    machine = {"device": device, "interpreter": device == "cpu", "harness": version, "torch": "2.11", "triton": "3.6"}
    return document({**machine, **env}, f"kda {version}", 0, made, [], {})


def told(*documents: dict) -> list[tuple[str, str, str, str]]:
    """(quantity, verdict, last version that had it otherwise, first since)."""
    found = changes([Run.of(one) for one in documents])
    return [(c.key[1], c.verdict, c.before.version, c.since.version) for c in found]


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([("OK", 0.4), ("OK", 0.5), ("BUG", 9.0), ("BUG", 8.0)], [("o", "worse", "1", "2")]),
        ([("BUG", 9.0), ("OK", 0.5)], [("o", "better", "0", "1")]),
        ([("OK", 0.3), ("OK", 0.31), ("OK", 0.8)], [("o", "worse", "1", "2")]),
        ([("OK", 0.9), ("OK", 0.4)], [("o", "better", "0", "1")]),
        ([("OK", 0.1), ("OK", 0.3)], []),
        ([("OK", 0.5), ("OK", 0.6)], []),
        ([("BUG", 9.0), ("OK", 0.4), ("BUG", 9.0)], [("o", "worse", "1", "2")]),
        ([("BUG", float("inf")), ("BUG", float("inf"))], []),
        ([("OK", 0.4)], []),
    ],
    ids=["a_bug", "its_fix", "growth", "shrinking", "small", "noise", "back_again", "still_infinite", "one_run"],
)
def test_what_is_not_what_it_was(rows, expected):
    assert told(*(result(str(i), ("o", *row)) for i, row in enumerate(rows))) == expected


def test_rows_that_a_run_did_not_have_are_looked_for_further_back():
    runs = [result("0", ("dk", "OK", 0.4)), result("1", ("o", "OK", 0.4)), result("2", ("dk", "BUG", 3.0))]
    assert told(*runs) == [("dk", "worse", "0", "2")]


def test_only_runs_of_one_place_are_compared():
    runs = [Run.of(result("0", ("o", "OK", 0.4), device=device)) for device in ("cpu", "NVIDIA H200", "cpu")]
    assert {place: len(group) for (_, place), group in by_place(runs).items()} == {
        "cpu, interpreted": 2,
        "NVIDIA H200": 1,
    }


@pytest.mark.parametrize(
    "classes, status, said",
    [(("OK", "BUG"), 1, "1 worse"), (("BUG", "OK"), 0, "nothing is worse"), (("OK",), 3, "no two runs")],
    ids=["worse", "better", "one_run"],
)
def test_the_command_says_what_and_since_when(classes, status, said, tmp_path, capsys):
    lines = [json.dumps(result(f"0.{i}", ("o", klass, 0.4))) for i, klass in enumerate(classes)]
    (tmp_path / RESULTS).write_text("\n".join([*lines, '{"schema": 1, "env"']))
    assert cli.main(["history", "--report", str(tmp_path)]) == status
    out = capsys.readouterr().out
    assert said in out and f"{RESULTS}:{len(lines) + 1} is left out" in out
    if len(classes) > 1:
        assert "kda 0.0" in out and "kda 0.1" in out


@pytest.mark.parametrize("text", ['{"schema": 2}', "[]", '{"schema": 1, "env": {}, "subject": "x", "routes": [{}]}'])
def test_what_is_no_result_is_said(text, tmp_path, capsys):
    (tmp_path / RESULTS).write_text(text)
    assert cli.main(["history", "--report", str(tmp_path)]) == 3
    assert "is left out: " in capsys.readouterr().out


def test_a_report_without_results_is_wrong_use(tmp_path, capsys):
    assert cli.main(["history", "--report", str(tmp_path / "none")]) == 2
    assert "report has" in capsys.readouterr().err
