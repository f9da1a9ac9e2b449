"""The `kda` command: exit status, what it says, and that one broken line of a kernel never goes unnoticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from harness.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = "tests.harness.subjects"


def check(tmp_path, *arguments: str) -> int:
    return main(["check", "--device", "cpu", "--report", str(tmp_path), *arguments])


def test_a_right_subject_exits_0_and_leaves_a_result(tmp_path, capsys):
    target = tmp_path / "result.json"
    status = check(tmp_path, "--routes", "torch", "--families", "impulse", "--json", str(target))
    assert status == 0, capsys.readouterr().out
    document = json.loads(target.read_text())
    assert document["schema"] == 1 and document["findings"] == []
    assert {row["class"] for row in document["routes"]} == {"OK"}
    assert document["coverage"]["checked"] == document["coverage"]["planned"] > 0
    assert (tmp_path / "results.jsonl").read_text().count("\n") == 1


def test_a_finding_exits_1_and_can_be_replayed(tmp_path, capsys):
    status = check(tmp_path, "--subject", f"{SUBJECTS}:wrong", "--families", "impulse", "--budget", "40s")
    shown = capsys.readouterr().out
    assert status == 1
    assert "BUG: o of chunk-unbounded (" in shown
    (path, *_) = tmp_path.glob("*/chunk-unbounded-o-bug-*/problem.json")
    assert isinstance(Problem.load(path), Problem)
    assert "BUG: o of chunk-unbounded" in (path.parent / "report.html").read_text()
    assert f'href="{path.parent.name}/report.html"' in (path.parents[1] / "index.html").read_text()
    assert (
        main(["replay", str(path), "--subject", f"{SUBJECTS}:wrong", "--device", "cpu", "--report", str(tmp_path)]) == 1
    )
    assert main(["replay", str(path), "--device", "cpu", "--report", str(tmp_path)]) == 0


@pytest.mark.parametrize("glob", [("--routes", "no*such"), ("--families", "nothing")], ids=["routes", "families"])
def test_an_empty_selection_exits_3(tmp_path, glob):
    assert check(tmp_path, *glob) == 3


def test_a_budget_that_ends_too_early_exits_3(tmp_path):
    assert check(tmp_path, "--routes", "torch", "--families", "generic", "--budget", "0.01s") == 3


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["check", "--subject", "no.such.module"], "subject is 'no.such.module'"),
        (["replay", "nowhere.json"], "path is 'nowhere.json'"),
        (["check", "--budget", "soon"], "budget is 'soon'"),
        (["check", "--shape", "2x2"], "shape is '2x2'"),
        (["check", "--device", "tpu"], "device is 'tpu'"),
        (["check", "--budget", "0s"], "budget is '0s'"),
        (["check", "--subject", ""], "subject is ''"),
        (["check", "--subject", ":x"], "subject is ':x'"),
        (["check", "--routes", "torch", "--report", "{}", "--json", "{}/file/results.json"], "json is"),
        (["mutants", "--mutants", "offsets_32", "--json", "{}/file/mutants.json"], "json is"),
        (["replay", "{}/problem.json", "--routes", "nowhere"], "routes is 'nowhere'"),
        (["compare", "{}/problem.json", "--subjects", "kda", "--routes", "nowhere"], "routes is 'nowhere'"),
    ],
    ids=[
        *("subject", "path", "budget", "shape", "device", "no_time", "empty_subject", "no_module"),
        *("check_json", "mutants_json", "replay_routes", "compare_routes"),
    ],
)
def test_wrong_use_exits_2_and_names_the_argument(arguments, complaint, capsys, tmp_path):
    (tmp_path / "file").write_text("where a folder should be")
    (tmp_path / "problem.json").write_text(Problem().to_json())
    try:
        status = main([argument.format(tmp_path) for argument in arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_a_report_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["check", "--routes", "torch", "--report", str(blocked)]) == 2
    assert "report is" in capsys.readouterr().err


def test_routes_and_doctor(tmp_path, capsys):
    assert main(["routes"]) == 0
    assert "recurrent" in capsys.readouterr().out
    assert main(["doctor", "--report", str(tmp_path)]) == 0
    assert "one token, kernel against oracle: OK" in capsys.readouterr().out


BROKEN_LINES = {
    "carried_state": (
        "recurrent_kernels.py",
        "return b_S + b_k[:, None] * b_u[None, :]",
        "return b_S + b_k[:, None] * b_v[None, :]",
        "o",
    ),
    "lost_scale": (
        "recurrent_kernels.py",
        "b_q = load_qk(p_q, m_k, L2NORM) * scale",
        "b_q = load_qk(p_q, m_k, L2NORM)",
        "o",
    ),
    "wrong_base": ("fp32_math.py", "return tl.exp2(b_h) * (1.0 + b_l * LN2)", "return tl.exp2(b_x)", "ht"),
    "dk_term": (
        "recurrent_kernels.py",
        "b_dk = tl.sum(b_dS * b_u[None, :], axis=1) - tl.sum(b_S * b_dv[None, :], axis=1)",
        "b_dk = tl.sum(b_dS * b_u[None, :], axis=1)",
        "dk",
    ),
    "head_of_gate": (
        "recurrent_kernels.py",
        "p_g = g + (i_bos * HV + i_hv) * K + o_k",
        "p_g = g + (i_bos * HV) * K + o_k",
        "o",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_LINES)
def test_one_broken_line_is_found_and_named(fault, tmp_path):
    """The kernels are copied, one line is changed, and the command is run on the copy."""
    file, line, broken, quantity = BROKEN_LINES[fault]
    for package in ("kda", "oracle", "harness"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "kda" / file
    text = source.read_text()
    assert text.count(line) == 1
    source.write_text(text.replace(line, broken))
    command = [
        sys.executable,
        "-m",
        "harness",
        "check",
        "--device",
        "cpu",
        "--routes",
        "recurrent",
        "--families",
        "generic",
        "--budget",
        "60s",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"BUG: {quantity} of recurrent (" in done.stdout
