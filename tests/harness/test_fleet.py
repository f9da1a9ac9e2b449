"""What one runner found the next checks first: by a folder, a GitHub artifact, and a Redis server that is killed."""

import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness import fleet
from harness.call import Route
from harness.check import REPLAYED, Task, _jobs, replayed
from harness.fleet import Fleet, Replay
from harness.problem import Problem
from harness.results import Finding
from harness.subject import Subject
from harness.verdict import Verdict
from kda.fused_recurrent import PRECISION

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = Subject("mine", "1", tuple(Route(name, "chunk", len, PRECISION) for name in ("chunk-unbounded", "other")))
PROBLEM = Problem(entry="chunk", lengths=(3, 4), packed=True)
SMALL = Problem(entry="chunk", lengths=(1,))


def finding(problem: Problem = PROBLEM, statistic: str = "element", route: str = "chunk-unbounded") -> Finding:
    return Finding.of(route, Verdict("o", "BUG", 3.0, statistic), problem)


def known(folder: Path, where: str, routes: str = "*") -> list[Replay]:
    """What a runner with this local folder would check first."""
    return list(map(Replay.of, Fleet(folder, where).replays(SUBJECT, routes)))


class Server:
    """A Redis server that keeps what it was told, even if it is killed."""

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.url, self.process = folder, f"redis://127.0.0.1:{self.port}/0", None
        self.start()

    def start(self) -> None:
        keeping = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["redis-server", *where, *keeping], **quiet)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path):
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("needs the Python package redis (the extra [fleet])")
    folder = tmp_path / "redis"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.kill()


@pytest.fixture(params=["folder", "redis"])
def shared(request, tmp_path):
    """Where two runners meet."""
    return str(tmp_path / "shared") if request.param == "folder" else request.getfixturevalue("redis").url


def test_what_one_runner_found_the_next_one_knows(shared, tmp_path):
    first = Fleet(tmp_path / "a", shared)
    first.add("mine@checkout", finding())
    first.add("mine", finding(SMALL, "strided"))
    first.add("mine", finding(SMALL, route="other"))
    first.add("yours", finding(Problem(entry="chunk", lengths=(7,))))
    there = {Replay("chunk-unbounded", SMALL, "strided"), Replay("chunk-unbounded", PROBLEM)}
    assert set(known(tmp_path / "b", shared, "chunk*")) == there
    assert len(known(tmp_path / "b", shared)) == 3
    assert not (tmp_path / "b").exists()


def test_without_a_database_findings_are_kept_and_nothing_is_replayed(tmp_path, monkeypatch):
    Fleet(tmp_path / "a").add("mine", finding())
    assert Fleet(tmp_path / "a").replays(SUBJECT) == []
    assert known(tmp_path / "b", str(tmp_path / "a")) == [Replay("chunk-unbounded", PROBLEM)]
    monkeypatch.setenv("KDA_DATABASE", str(tmp_path / "a"))
    assert len(Fleet(tmp_path / "b").replays(SUBJECT)) == 1


def test_an_artifact_is_read_and_not_written(tmp_path):
    Fleet(tmp_path / "ci").add("mine", finding())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for path in (tmp_path / "ci").glob("*/*"):
            file.write(path, path.relative_to(tmp_path / "ci"))
    cache = tmp_path / "mine-of-github"
    cache.mkdir()
    stem = datetime.now(UTC).isoformat().replace(":", "_")  # as Hypothesis names what it has downloaded
    (cache / f"{stem}.zip").write_bytes(packed.getvalue())
    here = Fleet(tmp_path / "mine", "github://owner/repository")
    here.add("mine", finding(SMALL))
    both = [Replay("chunk-unbounded", problem) for problem in (SMALL, PROBLEM)]
    assert list(map(Replay.of, here.replays(SUBJECT))) == both
    assert (cache / f"{stem}.zip").read_bytes() == packed.getvalue()


def test_a_server_that_dies_costs_a_warning_and_gets_what_it_missed(redis, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fleet, "PAUSE", 0.0)
    here = Fleet(tmp_path / "a", redis.url)
    here.add("mine", finding())
    redis.kill()
    for length in (1, 2):
        here.add("mine", finding(Problem(entry="chunk", lengths=(length,))))
    assert capsys.readouterr().err.count("does not answer") == 1
    redis.start()
    here.add("mine", finding(Problem(entry="chunk", lengths=(9,))))
    here.close()
    assert capsys.readouterr().err == f"kda: database {redis.url} is back\n"
    assert {r.problem.lengths for r in known(tmp_path / "b", redis.url)} == {(1,), (2,), (3, 4), (9,)}


def test_what_a_server_never_got_the_next_run_sends(redis, tmp_path, capsys):
    redis.kill()
    here = Fleet(tmp_path / "a", redis.url)
    assert here.replays(SUBJECT) == []
    here.add("mine", finding())
    here.close()
    assert "lacks 1 that are in the local folder" in capsys.readouterr().err
    redis.start()
    assert known(tmp_path / "a", redis.url) == [Replay("chunk-unbounded", PROBLEM)]
    assert known(tmp_path / "b", redis.url) == [Replay("chunk-unbounded", PROBLEM)]


def test_a_server_that_is_down_is_left_alone_for_a_while(tmp_path, capsys):
    asked = []

    class Down:
        def save(self, key, value):
            asked.append(key)
            raise OSError("no route to host")

    away = fleet.Steadfast(Down(), "database x")
    for key in (b"a", b"b", b"c"):
        away.save(key, b"")
    assert asked == [b"a"]
    assert capsys.readouterr().err == (
        "kda: database x does not answer (no route to host); the local folder has everything\n"
    )


def test_what_is_no_problem_is_left_out(tmp_path, capsys):
    here = Fleet(tmp_path / "a", str(tmp_path / "shared"))
    here.add("mine", finding())
    for junk in (b"\xff", b"{}", b'{"schema": 1, "problem": {}, "found": {"route": 3}}', PROBLEM.to_json().encode()):
        here.database.save(fleet._key("mine", "chunk-unbounded", "chunk"), junk)
    assert list(map(Replay.of, here.replays(SUBJECT))) == [Replay("chunk-unbounded", PROBLEM)]
    assert capsys.readouterr().err.count("which is left out") == 4


@pytest.mark.parametrize(
    "where, said",
    [
        ("ftp://host", "database is 'ftp://host'; it must be redis://…"),
        ("github://owner", "database is 'github://owner'; it must be redis://…"),
        ("redis://:secret@host:port", "database is 'redis://host:port'; it "),
        ("/proc/none", "database is '/proc/none'; it must be a folder"),
    ],
    ids=["scheme", "no_repository", "no_port", "no_folder"],
)
def test_another_place_is_refused_without_its_password(tmp_path, where, said):
    with pytest.raises(ValueError) as caught:
        Fleet(tmp_path, where)
    assert str(caught.value).startswith(said) and "secret" not in str(caught.value)


def test_a_problem_is_replayed_in_the_form_that_it_failed_in(tmp_path):
    here = Fleet(tmp_path / "a", str(tmp_path / "shared"))
    for statistic in ("strided", "element"):
        here.add("mine", finding(statistic=statistic))
    tasks = replayed(here.replays(SUBJECT) * 2)
    plain, strided = sorted(tasks, key=lambda task: task.form)
    assert plain == Task("chunk-unbounded", REPLAYED, PROBLEM, True)
    assert strided == Task("chunk-unbounded", REPLAYED, PROBLEM, True, form="strided")
    (job,) = _jobs(SUBJECT, [strided])
    assert job.repeat and "strided" in job.forms


PROGRAM = """
import dataclasses, sys
from harness import cli, profiles
profiles.PROFILES["dev"] = dataclasses.replace(profiles.PROFILES["dev"], shrink_seconds=0.0)
sys.exit(cli.main(sys.argv[1:]))
"""


def check(folder: Path, database: str, families: str, *more: str) -> subprocess.Popen:
    """`kda check` of a wrong subject that leaves its problems as they were found."""
    asked = ("--subject", "tests.harness.subjects:wrong", "--routes", "chunk-unbounded", "--families", families)
    command = [sys.executable, "-c", PROGRAM, "check", *asked, "--jobs", "1", "--database", database, *more]
    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | given | {"OMP_NUM_THREADS": "1"}, **quiet)


def test_a_check_while_the_server_is_killed_and_restarted_loses_nothing(redis, tmp_path):
    from redis import Redis

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    running = check(first, redis.url, "ragged")
    client = Redis.from_url(redis.url)
    while not client.dbsize():
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)
    redis.kill()
    for line in running.stderr:
        if "does not answer" in line:
            break
    redis.start()
    said = running.communicate(timeout=300)[1]
    assert running.returncode == 1 and "is back" in said
    found = {path.read_bytes() for path in (first / "report" / fleet.LOCAL).glob("*/*") if b"{" in path.read_bytes()}
    (key,) = client.keys("kda-example:kda *")
    assert found == client.smembers(key) and found

    running = check(second, redis.url, "impulse", "--json", "out.json")
    shown, said = running.communicate(timeout=300)
    assert running.returncode == 1 and "problems that failed before" in shown, said
    document = json.loads((second / "out.json").read_text())
    tried = {json.dumps(json.loads(text)["problem"], sort_keys=True) for text in found}
    rows = [row for row in document["routes"] if row["family"] == "replayed" and row["quantity"] == "o"]
    assert [(row["problems"], row["class"]) for row in rows] == [(len(tried), "BUG")]
    journal = next(second.glob("report/2*/journal.jsonl")).read_text().splitlines()
    assert len(json.loads(journal[0])["selection"]["replays"]) == len(found)


def test_the_suite_begins_with_what_failed_in_another_session(tmp_path):
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"),
        *("--rootdir", str(tmp_path), "--pyargs", "harness.suite", "--kda-device", "cpu", "--kda-database", "shared"),
        *("--kda-subject", "tests.harness.subjects:wrong", "--kda-routes", "chunk-unbounded"),
    ]
    given = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    quiet = {"capture_output": True, "text": True, "timeout": 300}

    def session(*more: str) -> str:
        done = subprocess.run([*command, *more], cwd=tmp_path, env=clean | given, **quiet)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    one = session("--kda-report", "a", "--kda-families", "intermediates", "-k", "dense-pregated-intermediates-fp32-4x3")
    assert "replayed" not in one
    again = session("--kda-report", "b", "--kda-families", "none", "-n", "2")
    failed = [line for line in again.splitlines() if line.startswith("FAILED")]
    assert len(failed) >= 1 and all("chunk-unbounded-replayed-" in line for line in failed)
