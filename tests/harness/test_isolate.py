"""Foreign code in a child process: crash, hang, randomness and vandalism are results, and the sweep goes on."""

import pytest

from harness.problem import Problem
from harness.runner import Runner
from harness.subject import load_subject

PROBLEM = Problem(entry="chunk", lengths=(5,), K=4, V=4, k="unit", v="gauss", g="mild", beta="uniform")
ROUTE = "chunk-unbounded"


@pytest.fixture
def run(tmp_path):
    runners = []

    def check(subject: str, problem: Problem = PROBLEM, repeat: bool = False, timeout: float = 60.0):
        if not runners:
            loaded = load_subject(f"tests.harness.subjects:{subject}")
            runners.append(Runner(loaded, "cpu", tmp_path, timeouts=(60.0, timeout)))
        return runners[0].check(ROUTE, problem, repeat=repeat).verdicts

    yield check
    for runner in runners:
        runner.close()


def classes(verdicts):
    return {verdict.quantity: verdict.klass for verdict in verdicts}


def test_a_right_subject_is_ok(run, tmp_path):
    verdicts = run("right")
    assert set(classes(verdicts).values()) == {"OK"}
    assert {"o", "ht", "dq", "dk", "dv", "dg", "dbeta"} <= set(classes(verdicts))
    assert list((tmp_path / "inflight").iterdir()) == []


def test_a_wrong_subject_is_a_bug(run):
    assert classes(run("wrong"))["o"] == "BUG"


def test_a_crash_is_a_result_and_the_problem_stays_on_disk(run, tmp_path):
    two_heads = Problem(**{**vars(PROBLEM), "heads": 2})
    assert classes(run("segfault_on_two_heads"))["o"] == "OK"
    (crash,) = run("segfault_on_two_heads", two_heads)
    assert (crash.klass, "SIGSEGV" in crash.message) == ("CRASH", True)
    (left,) = (tmp_path / "inflight").iterdir()
    assert Problem.load(left) == two_heads
    assert classes(run("segfault_on_two_heads"))["o"] == "OK"


def test_a_hang_is_a_result(tmp_path):
    subject = load_subject("tests.harness.subjects:hang")
    runner = Runner(subject, "cpu", tmp_path, timeouts=(12.0, 1.0))
    try:
        (verdict,) = runner.check(ROUTE, PROBLEM).verdicts
    finally:
        runner.close()
    assert (verdict.klass, "no answer within" in verdict.message) == ("HANG", True)


def test_randomness_has_its_own_class(run):
    assert "NONDETERMINISTIC" in {v.klass for v in run("random", repeat=True)}


def test_a_changed_input_is_a_bug(run):
    changed = [v for v in run("vandal") if v.quantity == "inputs"]
    assert [(v.klass, v.message) for v in changed] == [("BUG", "the call changed its argument v")]
