"""Report folders: complete, readable back, harmless whatever a subject says, and nothing lost where they cannot be."""

import errno
import faulthandler
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness import process_state, results
from harness.diagnose import Diagnosis, diagnose
from harness.isolate import Outcome
from harness.likeness.book import Entry, Like
from harness.likeness.signature import Signature
from harness.problem import Edit, Problem, materialise
from harness.report import folder
from harness.report.markdown import MOST_CHARACTERS, markdown
from harness.report.page import page
from harness.results import Finding, Report, environment
from harness.runner import Runner
from harness.subject import load_subject, own_subject
from harness.variants import WATCHED
from harness.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = "tests.harness.subjects"
PROBLEM = Problem(entry="chunk", lengths=(3, 2), packed=True, tail=1, heads=2, K=2, V=2, v="ramp", q="ramp", g="slow")
TOGETHER = Problem(  # no element alone is over its tolerance
    **{"entry": "chunk", "lengths": (5, 3), "packed": True, "K": 4, "V": 4, "heads": 2, "initial_state": True},
    **{"v": "gauss", "q": "unit", "g": "mild", "do": "gauss"},
)
FILES = {"report.html", "report.md", "problem.json", "expected.safetensors", "reproduce.py"}


def diagnosis(
    tmp_path: Path, subject: str, quantity: str, problem: Problem = PROBLEM, seconds: float = 0.0
) -> Diagnosis:
    runner = Runner(load_subject(f"{SUBJECTS}:{subject}"), "cpu", tmp_path, isolated=False)
    verdicts = runner.check("chunk-unbounded", problem, repeat=True).verdicts
    verdict = next(v for v in verdicts if v.quantity == quantity and v.klass in results.FAILURES)
    return diagnose(runner, Finding.of("chunk-unbounded", verdict, problem), seconds=seconds)


def written(tmp_path: Path, made: Diagnosis) -> Path:
    finding = folder.write(made, Report(tmp_path), environment("cpu"))
    return Path(finding.path).parent


def reproduced(script: Path, **environment: str) -> subprocess.CompletedProcess:
    """reproduce.py in a process that can import the subject and nothing else of this repository by accident."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, script.name], cwd=script.parent, env=given, capture_output=True, text=True)


@pytest.fixture(scope="module")
def leaky(tmp_path_factory) -> tuple[Diagnosis, Path]:
    tmp_path = tmp_path_factory.mktemp("leaky")
    made = diagnosis(tmp_path, "leaky", "o")
    return made, written(tmp_path, made)


def test_five_lines_name_the_place(leaky):
    lines = dict(leaky[0].lines)
    assert list(lines) == ["what", "where", "how", "needs", "stage"]
    assert lines["what"].startswith("BUG: o of chunk-unbounded (tests.harness.subjects:leaky): 4 of 24 elements wrong")
    assert lines["where"].startswith("sequence 1 of 2;")
    assert "value head 1 of 2; first at o[0][3][1][0] (sequence 1, token 0" in lines["where"]


def test_the_folder_is_complete_and_reads_back(leaky):
    made, where = leaky
    assert {path.name for path in where.iterdir()} == FILES
    assert Problem.load(where / "problem.json") == PROBLEM
    found = json.loads((where / "problem.json").read_text())["found"]
    assert (found["quantity"], found["class"], found["diagnosis"]) == ("o", "BUG", dict(made.said))
    tensors, field = load_file(where / "expected.safetensors"), made.field
    assert tensors["inputs.q"].equal(materialise(PROBLEM).inputs["q"])
    for name in ("got", "expected", "tolerance"):
        assert tensors[f"{name}.o"].equal(getattr(field, name))
    assert int(field.wrong.sum()) == 4


def test_the_script_exits_1_with_the_discrepancy_and_0_without_the_fault(leaky, tmp_path):
    script = leaky[1] / "reproduce.py"
    failed = reproduced(script)
    assert failed.returncode == 1, failed.stderr
    assert "o: 4 of 24 elements are over their tolerance\nthe fault is there" in failed.stdout
    assert "o[0][3][1][" in failed.stdout.splitlines()[0]
    imports = [line.split()[1] for line in script.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) <= {*sys.stdlib_module_names, "torch"}
    repaired = tmp_path / "reproduce.py"
    repaired.write_text(script.read_text().replace("leaky", "right"))
    gone = reproduced(repaired)
    assert gone.returncode == 0, gone.stderr
    assert "o: 0 of 24 elements are over their tolerance\nthe fault is gone" in gone.stdout


@pytest.mark.parametrize("klass", ["BUG", "NONDETERMINISTIC"])
def test_the_script_shows_what_depends_on_memory_that_nobody_wrote(klass, leaky, capfd):
    """On a machine where that memory happens to be harmless, too."""
    text = (
        (leaky[1] / "reproduce.py")
        .read_text()
        .replace("CLASS = 'chunk', 'o', 'BUG'", f"CLASS = 'chunk', 'o', {klass!r}")
    )
    assert status_of(text.replace("leaky", "unwritten")) == 1
    assert ("with NaN in memory that nobody has written" if klass == "BUG" else "differs") in capfd.readouterr().out
    assert status_of(text.replace("leaky", "right")) == 0


def loaded(text: str) -> dict:
    """The names of a script that has been read but not run."""
    space: dict = {"__name__": "script"}
    exec(compile(text, "reproduce.py", "exec"), space)
    return space


def status_of(text: str) -> int:
    try:
        return loaded(text)["main"]()
    except RuntimeError:
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    "subject, quantity, problem, said",
    [
        ("vandal", "inputs", PROBLEM, "arguments that the call changed: v"),
        ("random", "o", PROBLEM, "o: differs between 5 calls"),
        ("wrong", "dbeta", TOGETHER, "is rounding"),
        ("short", "o", replace(PROBLEM, loss="none"), "expected ([1, 6, 2, 2], 'float32')"),
        ("crash", "call", PROBLEM, ""),
    ],
    ids=["inputs", "nondeterministic", "together", "shape", "crash"],
)
def test_the_script_of_every_kind_of_failure(subject, quantity, problem, said, tmp_path, capfd):
    text = (written(tmp_path, diagnosis(tmp_path, subject, quantity, problem)) / "reproduce.py").read_text()
    assert status_of(text) == 1
    assert said in capfd.readouterr().out
    assert status_of(text.replace(f"{subject}.chunk", "right.chunk").replace(f"'{subject}'", "'right'")) == 0


STRAY = "bytes that the call wrote outside of its arguments: "


@pytest.mark.parametrize(
    "subject, quantity, form, said, gone",
    [
        ("overruns", "bands", "", f"{STRAY}4 behind v, the first 0 bytes away", f"{STRAY}none"),
        ("writes_into_gaps", "bands", "strided", "between the elements of q", f"{STRAY}none"),
        ("untidy", "process", "", "default dtype is torch.float64 after the call", "that the call changed: 0 of"),
        ("hoards", "memory", "", "memory kept by 12 calls", "memory kept by 12 calls"),
        ("vandal", "inputs", "", "arguments that the call changed: v", "arguments that the call changed: none"),
    ],
    ids=["behind", "in_gaps", "process", "memory", "inputs"],
)
def test_the_script_shows_what_a_call_does_beside_its_results(subject, quantity, form, said, gone, tmp_path):
    runner = Runner(load_subject(f"{SUBJECTS}:{subject}"), "cpu", tmp_path, isolated=False)
    problem = replace(PROBLEM, V=32)  # results of more bytes than Python keeps by itself
    verdicts = runner.check("chunk-unbounded", problem, repeat=True, forms=(form,)).verdicts
    verdict = next(v for v in verdicts if v.quantity == quantity and results.form_of(v) == form)
    made = diagnose(runner, Finding.of("chunk-unbounded", verdict, problem), seconds=0.0)
    script = written(tmp_path, made) / "reproduce.py"
    failed = reproduced(script)
    assert failed.returncode == 1, failed.stderr
    assert said in failed.stdout and failed.stdout.endswith("the fault is there\n")
    script.write_text(script.read_text().replace(f"'{subject}.", "'right.").replace(f"'{subject}'", "'right'"))
    right = reproduced(script)
    assert right.returncode == 0, right.stderr
    assert gone in right.stdout and right.stdout.endswith("the fault is gone\n")


def test_the_script_watches_the_settings_that_the_harness_does(leaky):
    settings = loaded((leaky[1] / "reproduce.py").read_text())["SETTINGS"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert set(settings) == {setting.name for setting in process_state.OF_DEVICE[device]}


def test_embedded_inputs_are_bit_for_bit_those_of_the_problem(tmp_path):
    """Large tensors as base64, small ones as numbers: bf16, fp16, infinities and -0.0 included."""
    edits = (Edit("v", (0, 0, 0), -0.0), Edit("g", (1, 0, 0), float("-inf")))
    problem = replace(PROBLEM, lengths=(30, 9), dtype="bf16", gate_dtype="fp16", v="gauss", edits=edits)
    script = loaded((written(tmp_path, diagnosis(tmp_path, "leaky", "o", problem)) / "reproduce.py").read_text())
    inputs = materialise(problem).inputs
    assert set(script["TENSORS"]) == set(inputs)
    for name, x in script["TENSORS"].items():
        assert script["same_bits"](x, inputs[name]), name


def test_a_hang_is_not_called_again(tmp_path):
    """Every further call would cost the watchdog's whole time."""
    runner = Runner(load_subject(f"{SUBJECTS}:hang"), "cpu", tmp_path, isolated=False)
    verdict = Verdict("call", "HANG", math.inf, "hang", "no answer within 120 s")
    made = diagnose(runner, Finding.of("chunk-unbounded", verdict, PROBLEM), seconds=60)
    assert dict(made.lines)["what"].endswith("no answer within 120 s")
    assert made.trials == () and made.fields == {} and made.location is None
    assert {path.name for path in written(tmp_path, made).iterdir()} == FILES


def test_markdown_fits_an_issue_and_has_the_numbers(leaky):
    text = (leaky[1] / "report.md").read_text()
    assert text.startswith("## BUG: o of chunk-unbounded\n")
    assert "| o[0][3][1][" in text and f"@example({PROBLEM!r})" in text
    assert "| 0 of sequence 1 | 1 | " in text
    made = replace(leaky[0], lines=(("what", "x" * MOST_CHARACTERS),))
    assert len(markdown(made, materialise(PROBLEM), environment("cpu"))) < MOST_CHARACTERS


HOSTILE = '</script><script>alert(1)</script><img src="http://example.invalid/x">'


def test_what_a_subject_says_stays_text(leaky):
    made = leaky[0]
    finding = replace(made.finding, message=HOSTILE, klass="CRASH")
    made = replace(
        made,
        subject=HOSTILE,
        finding=finding,
        lines=(("what", HOSTILE),),
        fields={"o": replace(made.field, quantity=HOSTILE)},
    )
    html = page(made, materialise(PROBLEM), environment("cpu"))
    assert html.count("<script") == 2 and "<img" not in html
    assert "default-src 'none'" in html


def full_disk(monkeypatch, name: str) -> None:
    replacing = os.replace

    def refuse(source, target):
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replacing(source, target)

    monkeypatch.setattr(results.os, "replace", refuse)


def test_a_disk_that_fills_up_costs_only_what_did_not_fit(leaky, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, "expected.safetensors")
    where = written(tmp_path, leaky[0])
    assert {path.name for path in where.iterdir()} == FILES - {"expected.safetensors"}
    assert "expected.safetensors could not be written ([Errno 28] No space left on device)" in capsys.readouterr().err


def test_a_problem_that_cannot_be_written_is_printed(leaky, tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, "problem.json")
    finding = folder.write(leaky[0], Report(tmp_path), environment("cpu"))
    said = capsys.readouterr().err
    assert finding.path == "" and "No space left on device" in said
    assert Problem.from_json(said[said.index("{") :]) == PROBLEM


def test_a_folder_that_is_read_only_is_said(leaky, tmp_path, capsys):
    report = Report(tmp_path)
    report.folder.write_text("a file where the folder should be")  # root may write to read-only folders
    finding = folder.write(leaky[0], report, environment("cpu"))
    assert finding.path == ""
    assert folder.write_index([finding], report, "leaky", 0) is None
    assert "index.html could not be written" in capsys.readouterr().err


def test_the_index_has_every_finding_the_worst_first(leaky, tmp_path):
    report = Report(tmp_path)
    finding = folder.write(leaky[0], report, environment("cpu"))
    others = [replace(finding, id=f"other{ratio}", ratio=ratio) for ratio in (2.0, float("inf"))]
    text = folder.write_index([others[0], finding, others[1]], report, "leaky", 0).read_text()
    places = [text.index(f'href="{one.id}/report.html"') for one in (others[1], finding, others[0])]
    assert places == sorted(places) and "<h1>3 findings</h1>" in text


STAGED_FP32 = Problem(entry="chunk", lengths=(3,), K=2, V=2, loss="none", q="ramp", k="unit", v="ramp", beta="half")


def test_the_script_runs_kernels_that_only_a_repaired_interpreter_takes(tmp_path):
    """The staged kernels in fp32 multiply in a way that Triton's own interpreter refuses."""
    runner = Runner(load_subject("kda"), "cpu", tmp_path, isolated=False)
    verdict = Verdict("o", "BUG", 5.0, "element")
    made = diagnose(runner, Finding.of("chunk-unbounded", verdict, STAGED_FP32), seconds=0.0)
    done = reproduced(written(tmp_path, made) / "reproduce.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "o: 0 of 6 elements are over their tolerance\nthe fault is gone" in done.stdout


@pytest.mark.parametrize("form", ["CLASS = 'BUG'", "CLASS = 'CRASH'", "CLASS, FORM = 'CRASH', 'watched'"])
def test_a_script_that_cannot_run_says_nothing_of_the_fault(form, leaky, tmp_path):
    """A package without the function is no fault in it."""
    script = tmp_path / "reproduce.py"
    text = (leaky[1] / "reproduce.py").read_text().replace("leaky", "nowhere")
    script.write_text(text.replace("def main():", f"{form}\n\n\ndef main():"))
    done = reproduced(script)
    assert done.returncode == 2
    assert "nothing is known of the fault" in done.stdout and "nowhere" in done.stderr


def test_a_failure_that_is_not_there_again_is_not_explained(tmp_path):
    runner = Runner(load_subject(f"{SUBJECTS}:right"), "cpu", tmp_path, isolated=False)
    verdict = Verdict("o", "BUG", math.inf, "nonfinite")
    made = diagnose(runner, Finding.of("chunk-unbounded", verdict, PROBLEM), seconds=0.0)
    assert "seen once, and not again: o: BUG, nonfinite" in dict(made.lines)["what"]
    assert made.location is None


def test_a_death_has_a_place_and_a_name(tmp_path):
    runner = Runner(load_subject(f"{SUBJECTS}:segfault"), "cpu", tmp_path, timeouts=(60.0, 60.0))
    try:
        (verdict,) = runner.check("chunk-unbounded", PROBLEM).verdicts
        lines = dict(diagnose(runner, Finding.of("chunk-unbounded", verdict, PROBLEM), seconds=0.0).lines)
    finally:
        runner.close()
    assert lines["what"].endswith(": killed by SIGSEGV")
    assert "subjects.py:" in lines["where"] and lines["where"].endswith(" in _segfault")
    assert lines["how"] == "Fatal Python error: Segmentation fault"


def test_a_call_without_tokens_cures_nothing(tmp_path):
    """Whatever the fault is, nothing is wrong with no elements."""
    problem = replace(PROBLEM, lengths=(1,), packed=False, tail=0, loss="none")
    made = diagnosis(tmp_path, "wrong", "o", problem, seconds=20.0)
    assert made.trials and "length=0" not in {trial.change for trial in made.trials}


def test_what_it_is_like_is_in_the_reports_beside_the_five_lines(leaky, tmp_path):
    known = Entry("near", "ragged", "kda/x.py:f", "the <last> row is lost", "chunk-unbounded", "chunk", Signature())
    made = replace(leaky[0], likes=(Like(known, 0.9),), like="near 0.90 (kda/x.py:f: the <last> row is lost)")
    where = written(tmp_path, made)
    assert "- **like**: near 0.90 (kda/x.py:f" in (where / "report.md").read_text()
    page = (where / "report.html").read_text()
    assert "Known faults that look like this one" in page and "the &lt;last&gt; row is lost" in page
    found = json.loads((where / "problem.json").read_text())["found"]
    assert found["diagnosis"] == {**dict(made.lines), "like": made.like}


@pytest.mark.parametrize(
    "status, variant", [("crash", WATCHED), ("ran", "")], ids=["the_sanitizer_complains", "it_does_not"]
)
def test_a_crash_is_minimised_as_the_sanitizer_sees_it(status, variant, tmp_path, monkeypatch):
    runner = Runner(own_subject(), "cpu", tmp_path)
    finding = Finding.of("chunk-unbounded", Verdict("call", "CRASH", math.inf, "crash", "killed by SIGSEGV"), PROBLEM)
    monkeypatch.setattr(runner, "run", lambda route, problem, variant: Outcome(status, {}, message="out of bounds"))
    steadier = runner.steadier(finding)
    assert (steadier.variant, steadier.klass, steadier.problem) == (variant, "CRASH", PROBLEM)
    wrong = replace(finding, quantity="o", klass="BUG")
    assert runner.steadier(wrong) is wrong


def test_what_the_sanitizer_sees_is_followed_where_the_call_itself_dies(tmp_path, monkeypatch):
    """The call itself is asked once for a diagnosis, and not at all by a search."""
    runner, asked = Runner(own_subject(), "cpu", tmp_path), []

    def dies(route, problem, variant=None, stages=False, again=False):
        asked.append(variant.name if variant else "")
        return Outcome("crash", message="out of bounds: kernel one, program (0,)" if variant else "killed by SIGSEGV")

    monkeypatch.setattr(runner, "run", dies)
    died = Finding.of("chunk-unbounded", Verdict("call", "CRASH", math.inf, "crash", "killed by SIGSEGV"), PROBLEM)
    finding = runner.steadier(died)
    asked.clear()
    assert runner.fails_like(finding, PROBLEM)
    assert asked == [WATCHED]
    lines = dict(diagnose(runner, finding, seconds=0.0).lines)
    assert "seen once" not in lines["what"]
    assert lines["stage"] == "kernel one, as the sanitizer says"
