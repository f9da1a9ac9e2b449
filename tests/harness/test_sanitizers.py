"""compute-sanitizer by way of a stand-in on the PATH: what its reports become, and what is no fault of a kernel."""

import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from harness import cli, sanitizers
from harness.families import family
from harness.fitting import fitted
from harness.runner import Runner
from harness.sanitizers import Watch
from harness.subject import load_subject
from kda import fused_fwd

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at kda_scan_kernel+0x1c0 in scan.py:16
=========     by thread (3,0,0) in block (7,0,0)
=========     Access to 0x7f3a00000402 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3a00000400 of size 2 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x1234]
=========
========= Invalid __global__ write of size 2 bytes
=========     at kda_scan_kernel+0x1c0 in scan.py:16
=========     by thread (4,0,0) in block (9,0,0)
=========     Access to 0x7f3a00000412 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""
HAZARD = """========= COMPUTE-SANITIZER
========= Error: Potential WAW hazard detected at __shared__ 0x40 in block (2,0,0) :
=========     Write Thread (0,0,0) at kda_sums_kernel+0x90 in sums.py:18
=========     Write Thread (32,0,0) at kda_sums_kernel+0x90 in sums.py:18
=========     Current Value : {}, Incoming Value : {}
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OUT_OF_BOUNDS = "Invalid __global__ write of size 2 bytes; in kda_scan_kernel; out of bounds"
TOOL = f"""#!{sys.executable}
import os, sys
log = sys.argv[sys.argv.index("--log-file") + 1]
os.environ["SANITIZER_LOG"] = log
rest = sys.argv[sys.argv.index({sys.executable!r}):]
os.execv(rest[0], rest)
"""


@pytest.mark.parametrize(
    "tool, said, expected",
    [
        ("memcheck", MEMCHECK, (OUT_OF_BOUNDS,)),
        ("racecheck", HAZARD.format(3, 4), ("Error: Potential WAW hazard detected; in kda_sums_kernel",)),
        ("racecheck", HAZARD.format(3, 3), ()),
        ("initcheck", "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", ()),
    ],
    ids=["out_of_bounds", "race", "writes_of_the_same_value", "clean"],
)
def test_reports_are_read_once(tool, said, expected, tmp_path):
    watch = Watch(tool, tmp_path)
    watch.log.write_text(said)
    assert watch.faults() == expected
    assert watch.faults() == ()
    with open(watch.log, "a") as log:
        log.write(said)
    assert watch.faults() == expected


@pytest.mark.parametrize("tool, tma", [("memcheck", None), ("racecheck", None), ("initcheck", "0")])
def test_initcheck_sees_no_write_by_tma_and_so_there_is_none(tool, tma, tmp_path, monkeypatch):
    environment = Watch(tool, tmp_path).environment({})
    assert environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **({} if tma is None else {"KDA_TMA": tma})}
    monkeypatch.setattr(fused_fwd, "arch", lambda device: fused_fwd.TMA_ARCH)
    monkeypatch.setattr(os, "environ", environment)
    assert fused_fwd.has_tma(torch.device("cuda")) is (tma is None)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    tool = tmp_path / sanitizers.NAME
    tool.write_text(TOOL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("name, classes", [("reported", {"CRASH"}), ("right", set())])
def test_what_a_tool_reports_of_a_call_is_a_finding(name, classes, stand_in, tmp_path):
    """The subject writes such a report where the tool would: of that call alone, and with the tool's name."""
    problem = next(fitted(example, "chunk-unbounded", "chunk") for example in family("impulse").examples)
    runner = Runner(load_subject(f"tests.harness.subjects:{name}"), "cpu", tmp_path, sanitizer="memcheck")
    try:
        verdicts = runner.check("chunk-unbounded", problem).verdicts
    finally:
        runner.close()
    found = [v for v in verdicts if v.quantity == "call"]
    assert {v.klass for v in found} == classes
    assert [(v.statistic, v.message) for v in found] == [("memcheck", OUT_OF_BOUNDS)] * bool(classes)


@pytest.mark.parametrize("device, said", [("cpu", "on the CPU"), ("cuda", "must be on the PATH")])
def test_what_cannot_watch_is_refused(device, said, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=said):
        sanitizers.must_be_usable("memcheck", device)


def test_the_command_refuses_it_on_a_cpu(capsys, tmp_path):
    arguments = ["check", "--device", "cpu", "--sanitizer", "racecheck", "--report", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert "sanitizer is 'racecheck'" in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []
