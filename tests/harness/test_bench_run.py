"""kda bench at work on the CPU, with a clock that is told the times: cases, reasons, errors, and what a run leaves."""

import argparse
import math
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import kda
from harness.bench import cases, command, contenders
from harness.bench.document import Document
from harness.bench.measure import Settings, Truth, evenly_spaced, measure, relative_rms
from harness.bench.timing import Summary
from harness.call import call
from harness.isolate import StorageError
from harness.problem import materialise
from oracle.operator import evaluate
from tests.harness import peers

SMALL = replace(cases.CASES["k3-T8192-H96"], lengths=(5,), heads=2, K=8, V=4)
DECODE = replace(cases.CASES["decode-B64-H32"], lengths=(1, 1), heads=2, K=8, V=4)
RIGHT_SUBJECT, WRONG_SUBJECT = "tests.harness.subjects:right", "tests.harness.subjects:wrong"


class Told:
    """A clock that runs each call once and says what it was told; graphs cannot be had."""

    def __init__(self, milliseconds: float = 2.0, interrupted_at: int | None = None):
        self.milliseconds, self.interrupted_at, self.asked = milliseconds, interrupted_at, 0

    def cold(self, call, count):
        self.asked += 1
        if self.asked == self.interrupted_at:
            raise KeyboardInterrupt
        call()
        return [self.milliseconds] * count

    def host(self, call, count):
        return [self.milliseconds / 10] * count

    def capture(self, call, needed_bytes):
        raise RuntimeError("no graphs here\nsecond line")


def test_heads_are_repeated_in_memory_of_their_own():
    problem = replace(SMALL, heads=6, group=2)
    case, few = cases.tensors(problem, "cpu"), materialise(replace(problem, heads=3))
    assert {name: x.shape for name, x in case.inputs.items()} == {
        name: x.shape for name, x in materialise(problem).inputs.items()
    }
    for name, axis in {"q": 2, "v": 2, "do": 2, "A_log": 0, "dt_bias": 0}.items():
        for half in case.inputs[name].chunk(2, axis):
            assert torch.equal(half, few.inputs[name]), name


def test_bytes_that_must_move():
    case = cases.tensors(SMALL, "cpu")
    token = 2 * (8 + 8 + 4 + 8 + 1)  # of one head: q, k, v, g, beta in bf16
    inputs = 5 * 2 * token + 4 * (2 + 2 * 8)
    forward = inputs + 5 * 2 * 2 * 4 + 4 * 2 * 8 * 4
    assert cases.bytes_that_must_move(case, "forward") == forward
    for mode in ("forward_backward", "kept"):
        assert cases.bytes_that_must_move(case, mode) == forward + inputs + 5 * 2 * 2 * 4


@pytest.mark.parametrize(
    "changes, tokens, states", [({}, 1, 2), ({"rejected": 3}, 4, 5), ({"step": 4, "lengths": (4, 4)}, 4, 2)]
)
def test_bytes_that_one_call_of_decoding_must_move(changes, tokens, states):
    case = cases.tensors(replace(DECODE, **changes), "cpu")
    token = 2 * (8 + 8 + 4 + 8 + 1 + 4)  # of one head: q, k, v, g, beta and o in bf16
    expected = 2 * 2 * tokens * token + 4 * (2 + 2 * 8) + states * 2 * 2 * 8 * 4 * 4
    assert cases.bytes_that_must_move(case, "forward") == expected


@pytest.mark.parametrize("route", ["torch", "decode"])
def test_decoding_is_timed_a_call_at_a_time(route):
    case = cases.tensors(replace(DECODE, rejected=2), "cpu")
    (ours,) = contenders.contenders(contenders.subjects("kda")[0], route, "decode")
    work = ([ours], Told(), Settings(rounds=1, round_ms=1e-9), Truth.of(case, 2, gradients=False))
    ((row,), skipped) = measure("small", case, "forward", *work)
    assert skipped == [] and set(row.errors) == {"o", "ht"} and max(row.errors.values()) < 2**-8
    assert measure("small", case, "forward_backward", *work)[1][0].reason == "has no gradients"
    with contenders.conditions(ours, "forward"), kda.record_launches() as launches:
        o = contenders.timed_call(ours, case, "forward")()
    assert o.shape == (2, 3, 2, 4) and {launch.route for launch in launches} == {route}


def test_what_is_kept_for_gradients_is_asked_for():
    case = cases.tensors(replace(SMALL, dtype="bf16", K=64, V=64), "cpu")
    (fused,) = entrants("kda", "fused-unbounded")
    with contenders.conditions(fused, "kept"), kda.record_launches() as launches:
        contenders.timed_call(fused, case, "kept")()
    assert [launch.kernel for launch in launches].count("kda_fused_prep_kernel") == 1
    case = cases.tensors(replace(SMALL, safe_gate=False), "cpu")
    assert {contenders.refusal(one, case, "kept") for one in entrants(RIGHT_SUBJECT)} >= {"has no disable_recompute"}


def test_decode_cases_are_one_call():
    decoded = [problem for problem in cases.CASES.values() if problem.entry == "decode"]
    assert decoded and all(set(problem.lengths) == {problem.step} for problem in decoded)


@pytest.mark.parametrize(
    "heads, count, expected", [(96, 2, [0, 95]), (4, 1, [0]), (2, 8, [0, 1]), (9, 3, [0, 4, 8]), (5, 0, [])]
)
def test_heads_looked_at(heads, count, expected):
    assert evenly_spaced(heads, count) == expected


@pytest.mark.parametrize(
    "got, exact, expected",
    [([1.0, 1.0], [1.0, 0.0], 1.0), ([0.0], [0.0], 0.0), ([1.0], [0.0], math.inf), ([math.nan], [1.0], math.inf)],
    ids=["as_large", "zeros", "nothing_expected", "nan"],
)
def test_relative_rms(got, exact, expected):
    assert relative_rms(torch.tensor(got), torch.tensor(exact).double()) == expected


def entrants(subjects: str, routes: str = "torch") -> list:
    return contenders.contenders(contenders.subjects(subjects)[0], routes)


def test_the_reference_route_competes_where_it_is_asked_for_by_name():
    routes = lambda globs: {one.route.id for one in entrants("kda", globs)}  # noqa: E731
    assert routes("torch, fused-*") == {"torch", "fused-safe_gate", "fused-unbounded"}
    assert "torch" not in routes("*") | routes("t*,chunk-*")


@pytest.mark.parametrize("mode", cases.USUAL)
def test_errors_are_those_of_the_contender(mode):
    """One route three times: ours, behind a foreign name, and there 1 % off in o before it is rounded to bf16."""
    case = cases.tensors(replace(SMALL, safe_gate=False, lengths=(2, 3), packed=True), "cpu")
    names = ("kda torch", *(f"{name} chunk-unbounded" for name in (RIGHT_SUBJECT, WRONG_SUBJECT)))
    truth = Truth.of(case, 2, gradients=True)
    work = (entrants(f"kda,{RIGHT_SUBJECT},{WRONG_SUBJECT}"), Told(), Settings(rounds=2, round_ms=1e-9), truth)
    rows, skipped = measure("small", case, mode, *work)
    assert [one.contender for one in rows] == list(names)
    assert {one.reason for one in skipped} == {"the safe_gate path takes safe_gate problems"}
    ours, right, wrong = (one.errors for one in rows)
    assert ours == right and set(ours) >= ({"o", "ht"} if mode == "forward" else {"dq", "dA_log"})
    assert max(ours.values()) < 2**-8 and wrong["o"] == pytest.approx(0.01, abs=2**-8)
    assert rows[0].eager == Summary(2.0, 2.0, 2.0, 2.0, 2) and rows[0].host.median == 0.2
    assert (rows[0].graph, rows[0].no_graph) == (None, "RuntimeError: no graphs here")


def test_the_timed_call_returns_what_the_operator_does():
    case = cases.tensors(SMALL, "cpu")
    (ours,) = entrants("kda")
    exact = evaluate(case.inputs, case.options)
    with contenders.conditions(ours, "forward_backward"):
        gradients = contenders.timed_call(ours, case, "forward_backward")()
    assert relative_rms(gradients[0], exact["dq"]) < 0.01
    with contenders.conditions(ours, "forward"), kda.record_launches() as launches:
        o, _ = contenders.timed_call(ours, case, "forward")()
    assert not o.requires_grad and relative_rms(o, exact["o"]) < 0.01
    assert {launch.route for launch in launches} == {"torch"}


@pytest.mark.parametrize(
    "route, changes, reason",
    [
        ("fused-safe_gate", {}, "takes Problem"),
        ("chunk-safe_gate", {"gate": "softplus", "lower_bound": None, "safe_gate": False}, "takes gates known to be"),
        ("torch", {}, None),
    ],
    ids=["fused_width", "unbounded", "taken"],
)
def test_reasons_of_our_own(route, changes, reason):
    (ours,) = entrants("kda", route)
    got = contenders.refusal(ours, cases.tensors(replace(SMALL, **changes), "cpu"), "forward")
    assert got is None if reason is None else got.startswith(reason)


def test_the_verifier_of_a_route_is_asked_too():
    (ours,) = entrants("kda", "fused-unbounded")
    willing = replace(ours, route=replace(ours.route, lacks=lambda problem: None))
    assert contenders.refusal(willing, cases.tensors(SMALL, "cpu"), "forward").startswith("has tiles for K and V")


def test_the_reference_route_competes_only_by_name():
    assert "kda torch" not in [one.name for one in entrants("kda", "*")]


def bench(tmp_path, clock: Told, chosen: dict, **changes) -> tuple[int, Document, str]:
    asked = {"subjects": "kda,no.such.module", "routes": "torch", "modes": ("forward",), "budget": None}
    asked |= {"json": tmp_path / "bench.json", "plot": tmp_path / "bench.svg", **changes}
    shown = Console(file=StringIO(), width=200)
    run = command.Bench("cpu", clock, Settings(rounds=1, round_ms=1e-9), argparse.Namespace(**asked), shown)
    status = run.run(chosen, 4e12)
    return status, Document.load(asked["json"]), shown.file.getvalue()


def test_a_whole_run(tmp_path):
    status, found, shown = bench(tmp_path, Told(), {"small": SMALL}, subjects="kda", modes=cases.MODES)
    assert (status, [one.key for one in found.rows]) == (0, [("small", mode, "kda torch") for mode in cases.MODES])
    assert found.problems == {"small": repr(SMALL)}
    assert "relative rms against float64 on 2 heads" in shown
    assert ElementTree.parse(tmp_path / "bench.svg").getroot().tag.endswith("svg")


class Replayed(Told):
    """Has graphs of one contender, which take half the time; `lost` ones fail when they are replayed."""

    def __init__(self, lost: bool):
        super().__init__()
        self.lost, self.captured = lost, 0

    def capture(self, call, needed_bytes):
        self.captured += 1
        return (lambda: "graph") if self.captured == 1 else super().capture(call, needed_bytes)

    def cold(self, call, count):
        if call() != "graph":
            return [self.milliseconds] * count
        if self.lost:
            raise RuntimeError("the replay failed")
        return [self.milliseconds / 2] * count


@pytest.mark.parametrize("lost", [False, True], ids=["replayed", "lost"])
def test_graph_times_stand_beside_eager_ones(tmp_path, lost):
    problem = replace(SMALL, safe_gate=False)
    status, found, shown = bench(tmp_path, Replayed(lost), {"small": problem}, subjects=f"kda,{RIGHT_SUBJECT}")
    ours, theirs = found.rows
    assert (status, ours.eager.median, theirs.eager.median, theirs.graph) == (0, 2.0, 2.0, None)
    assert theirs.no_graph == "RuntimeError: no graphs here"
    assert (ours.graph is None) == lost and (lost or ours.graph.median == 1.0)
    assert ours.no_graph == ("RuntimeError: the replay failed" if lost else "")
    assert f"no graph: {theirs.contender}: {theirs.no_graph}" in shown


@pytest.mark.parametrize(
    "clock, changes, rows, kind",
    [
        (Told(), {}, 2, "missing"),
        (Told(interrupted_at=2), {}, 1, "left"),
        (Told(), {"budget": 1e-9}, 0, "left"),
    ],
    ids=["missing_subject", "interrupted", "budget"],
)
def test_less_than_asked_for_exits_3_and_keeps_what_there_is(tmp_path, clock, changes, rows, kind):
    status, found, shown = bench(tmp_path, clock, {"first": SMALL, "second": SMALL}, **changes)
    assert (status, len(found.rows)) == (3, rows)
    assert kind in {one.kind for one in found.skipped}
    assert "subject is 'no.such.module'" in shown


def test_a_file_that_cannot_be_written_is_said_before_anything_is_timed(tmp_path):
    clock = Told()
    with pytest.raises(StorageError, match="could not be written"):
        bench(tmp_path, clock, {"small": SMALL}, json=tmp_path)
    assert clock.asked == 0


def test_a_case_that_does_not_fit_is_left_and_the_next_one_measured(tmp_path, monkeypatch):
    made = cases.tensors

    def short_of_memory(problem, device):
        if problem.V == 5:
            raise torch.OutOfMemoryError("out of memory")
        return made(problem, device)

    monkeypatch.setattr(cases, "tensors", short_of_memory)
    chosen = {"large": replace(SMALL, V=5), "small": SMALL}
    status, found, _ = bench(tmp_path, Told(), chosen, subjects="kda")
    assert (status, [one.case for one in found.rows]) == (3, ["small"])
    assert found.skipped[0].reason == "large does not fit: out of memory"


def test_a_call_that_raises_is_a_reason(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("in a kernel\nwith details")

    monkeypatch.setattr("tests.harness.subjects.right", SimpleNamespace(chunk_kda=broken))
    status, found, _ = bench(tmp_path, Told(), {"small": SMALL}, subjects=f"kda,{RIGHT_SUBJECT}")
    failed = [one for one in found.skipped if one.kind == "failed"]
    assert (status, failed[0].reason) == (3, "ZeroDivisionError: in a kernel")


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_flash_kda_is_timed_in_its_own_layout(v_first, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_kda", SimpleNamespace(fwd=peers.flash_kda_fwd))
    changes = {"lengths": (2, 1), "packed": True, "K": 128, "V": 128, "initial_state": True, "h0": "gauss"}
    case = cases.tensors(replace(SMALL, v_first=v_first, **changes), "cpu")
    (contender,) = contenders.contenders(contenders.subjects("flash_kda")[0], "*")
    assert contenders.refusal(contender, case, "forward") is None
    assert contenders.timed_call(contender, case, "forward")() is None  # its own call, which fills buffers
    outputs = call(contender.route, case).outputs
    exact = evaluate(case.inputs, case.options, gradients=False)
    assert relative_rms(outputs["o"], exact["o"]) < 0.01 and relative_rms(outputs["ht"], exact["ht"]) < 0.01
    assert contenders.refusal(contender, case, "forward_backward") == "has no gradients"
