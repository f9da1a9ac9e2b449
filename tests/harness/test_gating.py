"""Gating in pytest: the suite, shares of it, known failures, and the status of a session that has seen too little."""

import datetime
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import expected, workers
from harness.check import plan
from harness.holding import WrongResult
from harness.options import Shard
from harness.profiles import PROFILES
from harness.shares import compile_key, share
from harness.subject import own_subject

ROOT = Path(__file__).resolve().parents[2]
TODAY = datetime.date(2027, 1, 31)
DRAWN = PROFILES["dev"].generated + 3  # problems of the family intermediates: its examples, and what is drawn


def suite(folder: Path, subject: str, *more: str, families: str = "intermediates") -> tuple[int, str]:
    """Exit status and output of the suite on a subject of ours, in another repository's folder."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-rxs", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"),
        *("--rootdir", str(folder), "--pyargs", "harness.suite", "--kda-device", "cpu", "--kda-families", families),
        *("--kda-subject", f"tests.harness.subjects:{subject}", "--kda-report", "report", *more),
    ]
    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=environment | given, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_right_subject_passes_and_a_wrong_one_is_told_where(tmp_path):
    status, shown = suite(tmp_path, "right", "--kda-routes", "chunk-unbounded")
    assert status == 0, shown
    assert f"chunk-unbounded: {DRAWN} problems held against the oracle" in shown
    status, shown = suite(tmp_path, "wrong", "--kda-routes", "chunk-unbounded", "-x")
    assert status == 1, shown
    assert "what   BUG: " in shown and len(list(tmp_path.glob("report/*/*/report.html"))) == 1


def test_known_failures_pass_until_their_day(tmp_path):
    """One entry that holds, one of a test that passes by now, one that is over, one without a test."""
    known = tmp_path / "known.txt"
    entries = (
        "# what we know",
        "*-dense-* 2999-01-01 o is 1% too large",
        "*varlen* 2020-01-01 fixed soon",
        "*none* 2999-01-01 why",
    )
    known.write_text("\n".join(entries))
    only = (
        "--kda-routes",
        "chunk-unbounded",
        "--kda-xfail",
        "known.txt",
        "-k",
        "dense-pregated-intermediates-fp32-4x3-mild",
    )
    status, shown = suite(tmp_path, "wrong", *only)
    assert status == 0 and "o is 1% too large (until 2999-01-01)" in shown, shown
    assert "line 3 expired on 2020-01-01: *varlen* (fixed soon)" in shown
    assert "line 4 matches no test: *none*" in shown and "line 2" not in shown
    status, shown = suite(tmp_path, "right", *only)
    assert status == 1 and "XPASS(strict)" in shown, shown


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("*a* 2999-01-01", "known.txt:1: the entry is '*a* 2999-01-01'; it must be PATTERN YYYY-MM-DD REASON"),
        ("\n*a* tomorrow why", "known.txt:2: the day is 'tomorrow'; it must look like 2027-01-31"),
    ],
    ids=["no_reason", "no_day"],
)
def test_a_bad_entry_is_refused_with_its_line(tmp_path, text, wrong):
    (tmp_path / "known.txt").write_text(text)
    with pytest.raises(ValueError, match=r"known\.txt") as error:
        expected.read(tmp_path / "known.txt")
    assert str(error.value).endswith(wrong)


def test_a_missing_file_of_known_failures_is_wrong_use(tmp_path):
    status, shown = suite(tmp_path, "right", "--kda-xfail", "nowhere.txt")
    assert status == 4 and "kda-xfail is 'nowhere.txt'; it must be a text file" in shown, shown


def _item(name: str) -> SimpleNamespace:
    marks: list = []
    return SimpleNamespace(callspec=SimpleNamespace(id=name), add_marker=marks.append, marks=marks)


@pytest.mark.parametrize("day, marked", [("2027-01-31", True), ("2027-01-30", False)], ids=["last_day", "day_after"])
def test_an_entry_holds_through_its_day(day, marked):
    entry = expected.Expected("*resets*", datetime.date.fromisoformat(day), "why", 1)
    items = [_item("recurrent-spikes_resets-dense"), _item("recurrent-generic-dense")]
    assert bool(expected.mark(items, [entry], TODAY)) is not marked
    assert [len(item.marks) for item in items] == [int(marked), 0]
    if marked:
        assert items[0].marks[0].kwargs == {"reason": "why (until 2027-01-31)", "raises": WrongResult, "strict": True}


def test_what_was_not_run_is_no_pass(tmp_path):
    status, shown = suite(tmp_path, "right", "--kda-budget", "0.001s")
    assert status == 3 and f"0 problems held against the oracle, {DRAWN} out of time" in shown, shown
    status, shown = suite(tmp_path, "right", "--kda-routes", "gate")
    assert status == 2 and "'routes': 'gate'" in shown and "nothing would be held" in shown, shown


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_disjoint_complete_and_alike(count):
    tasks = plan(own_subject(), PROFILES["dev"], "*", "*", "cpu", 0)
    shares = [share(tasks, Shard(index, count)) for index in range(1, count + 1)]
    assert sorted(repr(task) for part in shares for task in part) == sorted(map(repr, tasks))
    keys = [set(map(compile_key, part)) for part in shares]
    assert sum(map(len, keys)) == len(set.union(*keys)), "no key is compiled on two machines"
    assert max(map(len, shares)) <= 1.1 * len(tasks) / count
    assert share(tasks, None) == tasks


def test_shards_of_a_session_make_the_whole(tmp_path):
    shown = [suite(tmp_path, "right", "--kda-shard", f"{i}/2", "--collect-only")[1] for i in (1, 2)]
    ids = [{line for line in text.splitlines() if "test_route[" in line} for text in shown]
    everything = {line for line in suite(tmp_path, "right", "--collect-only")[1].splitlines() if "test_route[" in line}
    assert ids[0] and ids[1] and not ids[0] & ids[1] and ids[0] | ids[1] == everything


@pytest.mark.parametrize(
    "worker, visible, device, share",
    [("gw0", "0,1", "0", 0.3), ("gw3", "0,1", "1", 0.3), ("gw4", "5", "5", 0.18), ("gw1", "GPU-a,GPU-b", "GPU-b", 0.3)],
)
def test_workers_are_dealt_over_gpus(monkeypatch, worker, visible, device, share):
    for name, value in {"PYTEST_XDIST_WORKER": worker, "CUDA_VISIBLE_DEVICES": visible}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "5")
    monkeypatch.delenv("KDA_WORKER_SHARE", raising=False)
    workers.pin_to_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device
    assert float(os.environ["KDA_WORKER_SHARE"]) == pytest.approx(share)


def test_outside_a_worker_every_gpu_is_left_visible(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    workers.pin_to_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
