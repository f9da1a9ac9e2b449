"""kda bench: statistics, turns, files, comparison, tables, exit status, and what a verdict costs."""

import json
import math
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from harness.bench import command, compare, oracle_cost, plot, tables, timing
from harness.bench.document import Document, Row, Skipped
from harness.bench.timing import Summary, samples_in, take_turns
from harness.cli import main


def summary(median: float, spread: float = 0.01) -> Summary:
    return Summary(median, median * (1 - 2 * spread), median * (1 - spread), median * (1 + spread), 20)


def row(contender: str = "kda fused-safe_gate", eager: float = 2.0, graph: float | None = 1.0, **changes) -> Row:
    made = Row(
        case="k3-T8192-H96",
        mode="forward",
        contender=contender,
        eager=summary(eager),
        host=summary(0.1),
        graph=None if graph is None else summary(graph),
        no_graph="" if graph else "it synchronises",
        first_call_seconds=3.0,
        compile_seconds=2.0,
        peak_bytes=2**30,
        moved_bytes=10**9,
        errors={"o": 2e-3, "ht": 1e-3},
    )
    return replace(made, **changes)


def document(*rows: Row, skipped: tuple[Skipped, ...] = ()) -> Document:
    env = {"device": "a GPU", "torch": "2", "triton": "3"}
    return Document(env, {"rounds": 5}, 4e12, {"k3-T8192-H96": "Problem()"}, list(rows), list(skipped))


@pytest.mark.parametrize(
    "times, expected",
    [
        ([3.0], Summary(3.0, 3.0, 3.0, 3.0, 1)),
        ([4.0, 1.0, 2.0, 3.0, 5.0], Summary(3.0, 1.0, 2.0, 4.0, 5)),
        ([1.0, 2.0], Summary(1.5, 1.0, 1.25, 1.75, 2)),
    ],
    ids=["one", "odd", "two"],
)
def test_summary(times, expected):
    assert Summary.of(times) == expected


def test_no_times_have_no_summary():
    with pytest.raises(ValueError, match="times is empty"):
        Summary.of([])


def test_everybody_takes_turns_and_another_one_is_first_in_each_round():
    order = []
    samplers = {name: lambda name=name: order.append(name) or [1.0, 2.0] for name in "abc"}
    assert take_turns(samplers, 4)["b"].samples == 8
    assert "".join(order) == "abcbcacababc"


def test_every_cold_sample_starts_from_an_overwritten_cache(monkeypatch):
    """With events that note when they are recorded, in place of a GPU's."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = len(seen)
            seen.append("event")

        def elapsed_time(self, end):
            return end.time - self.time

    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    clock = timing.CudaClock("cpu")
    clock.flush.fill_(1)

    def call():
        seen.append("call" if clock.flush.any() else "cold call")
        clock.flush.fill_(1)

    assert clock.cold(call, 2) == [2, 2]
    assert seen == ["call", "event", "cold call", "event", "event", "cold call", "event", "wait"]
    seen.clear()
    assert len(clock.host(call, 2)) == 2
    assert seen == ["wait", "call", "wait", "call", "wait"]


@pytest.mark.parametrize("seconds, expected", [(1e-9, 50), (4e-3, 5), (3.0, 1)], ids=["short", "middle", "long"])
def test_a_round_holds_as_many_samples_as_fit(seconds, expected):
    assert samples_in(20.0, seconds) == expected


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (summary(1.0), summary(1.2), "slower"),
        (summary(1.2), summary(1.0), "faster"),
        (summary(1.0), summary(1.025, 0.001), ""),
        (summary(1.0, 0.2), summary(1.2, 0.2), ""),
    ],
    ids=["slower", "faster", "below_noise", "overlapping_quartiles"],
)
def test_only_what_exceeds_noise_is_a_change(a, b, expected):
    assert compare.direction(a, b) == expected


def test_comparison_goes_by_graph_times_and_names_the_worst_error():
    a = document(row(), row("fla chunk-safe_gate", graph=None))
    b = document(row("fla chunk-safe_gate", graph=None, eager=1.0), row(graph=1.5, errors={"o": 4e-3, "ht": 1e-3}))
    ours, theirs = compare.changes(a, b)
    assert (ours.eager, ours.graph, ours.worst_error, ours.verdict) == (1.0, 1.5, 2.0, "slower")
    assert (theirs.eager, theirs.graph, theirs.verdict) == (0.5, None, "faster")


def test_a_document_round_trips_through_json(tmp_path):
    made = document(row(errors={"o": math.inf}), row("fla", graph=None), skipped=(Skipped("", "", "fla", "why"),))
    made.save(tmp_path / "a.json")
    assert Document.load(tmp_path / "a.json") == made
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    "text, complaint",
    [("{", "cannot be read"), ("[]", "no bench result"), ('{"schema": 1, "kind": "bench"}', "not a whole")],
    ids=["broken", "foreign", "partial"],
)
def test_what_is_no_result_is_refused(tmp_path, text, complaint):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Document.load(tmp_path / "a.json")


@pytest.mark.parametrize("graph, status", [(1.0, 0), (1.5, 1), (0.5, 0)], ids=["same", "slower", "faster"])
def test_compare_exits_by_what_is_slower(tmp_path, capsys, graph, status):
    document(row()).save(tmp_path / "a.json")
    document(row(graph=graph)).save(tmp_path / "b.json")
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == status
    assert f"{graph:.3f}" in capsys.readouterr().out


def test_compare_without_a_common_row_exits_3(tmp_path):
    document(row()).save(tmp_path / "a.json")
    document(row("other")).save(tmp_path / "b.json")
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 3


def test_without_a_gpu_it_says_so_and_exits_3(capsys):
    assert main(["bench", "--device", "cpu"]) == 3
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--cases", "no*such"], "cases is 'no*such'"),
        (["--modes", "sideways"], "modes is 'sideways'"),
        (["--error-heads", "-1"], "error-heads is '-1'"),
    ],
    ids=["cases", "modes", "error_heads"],
)
def test_wrong_use_exits_2_and_names_the_argument(arguments, complaint, capsys):
    try:
        status = main(["bench", "--list", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "contender, kind, status",
    [("kda chunk-unbounded", "failed", 1), ("fla chunk-unbounded", "failed", 3), ("kda fused", "refused", 0)],
    ids=["ours_failed", "theirs_failed", "refused"],
)
def test_exit_status(contender, kind, status):
    assert command.exit_status(document(row(), skipped=(Skipped("", "", contender, "why", kind),))) == status


def test_the_plot_has_a_bar_for_each_row():
    drawn = ElementTree.fromstring(plot.svg(document(row(), row("fla <chunk>", graph=None, eager=4.0))))
    bars = [float(x.get("width")) for x in drawn if x.tag.endswith("rect")][1:]
    assert bars[1] == pytest.approx(4 * bars[0], rel=0.01)
    assert "fla <chunk>" in [x.text for x in drawn]


def test_the_table_has_ratios_to_our_fastest_and_the_share_of_a_copy():
    rows = [row("kda slow", graph=9.0, eager=1.5), row(), row("fla chunk-safe_gate", graph=None, eager=4.0)]
    assert (tables.smallest(rows, "graph"), tables.smallest(rows, "eager"), tables.smallest([], "graph")) == (
        1,
        1.5,
        None,
    )
    shown = Console(file=StringIO(), width=200)
    shown.print(tables.times("case", "forward", rows, 4e12))
    cells = [line.replace(" ", "").split("│")[1:] for line in shown.file.getvalue().splitlines() if line[0] == "│"]
    assert [line[:5] for line in cells] == [
        ["kdaslow", "9.0000", "9.00", "1.5000", "1.00"],
        ["kdafused-safe_gate", "1.0000", "1.00", "2.0000", "1.33"],
        ["flachunk-safe_gate", "-", "-", "4.0000", "2.67"],
    ]
    assert [line[8] for line in cells] == ["17%", "25%", "6%"]


def test_the_cost_of_a_verdict():
    found = {cost.route: cost for cost in oracle_cost.costs(0.0, tokens=3, widths=(4,))}
    assert {"recurrent", "chunk-safe_gate", "chunk-unbounded"} <= set(found)
    assert all(cost.klass == "OK" and cost.ratio > 1 for cost in found.values())
    assert (found["recurrent"].target, found["chunk-unbounded"].target) == (10.0, 8.0)


@pytest.mark.parametrize("verdict, status", [(7.0, 0), (9.0, 1)], ids=["within", "beyond"])
def test_oracle_exits_by_the_target_and_writes_the_ratios(verdict, status, tmp_path, monkeypatch, capsys):
    cost = oracle_cost.Cost("chunk-unbounded", 32, summary(1.0), summary(verdict), summary(11.0), 8.0, "OK")
    monkeypatch.setattr(command, "costs", lambda seconds: [cost])
    assert main(["bench", "--oracle", "--json", str(tmp_path / "cost.json")]) == status
    shown = capsys.readouterr().out
    assert f"{verdict:.2f}" in shown and "11.00" in shown
    assert json.loads((tmp_path / "cost.json").read_text())["rows"][0]["ratio"] == verdict


def test_a_graph_that_would_not_leave_room_for_the_next_is_refused(monkeypatch):
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 4 * 2**30))
    with pytest.raises(RuntimeError, match=r"would hold 2.0 of 3.0 GiB"):
        timing.CudaClock("cpu").capture(lambda: None, 2 * 2**30)
