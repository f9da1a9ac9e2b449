"""Findings about another form of a call: the place, the form in words, and a script that shows it on its own."""

import faulthandler
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from harness.agreement import between
from harness.cli import main
from harness.diagnose import Diagnosis, diagnose
from harness.problem import Problem, materialise
from harness.report import folder
from harness.results import Finding, Report, environment, load_found
from harness.runner import Runner
from harness.subject import Route, Subject
from harness.variants import VARIANTS
from harness.verdict import Verdict
from kda.fused_recurrent import PRECISION
from tests.harness import wrong_forms
from tests.harness.test_variants import DENSE, PACKED

MODULE = "tests.harness.wrong_forms"
ROUTE = "chunk-unbounded"


def runner_of(tmp_path: Path, expression: str) -> Runner:
    function = wrong_forms
    for part in expression.split("."):
        function = getattr(function, part)
    route = Route(ROUTE, "chunk", function, PRECISION, invariant=True, origin=f"{MODULE}:{expression}")
    return Runner(Subject(expression, "", (route,)), "cpu", tmp_path, isolated=False)


def found(tmp_path: Path, expression: str, form: str) -> tuple[Runner, Finding]:
    problem = next(p for p in (PACKED, DENSE) if VARIANTS[form].applies(p))
    runner = runner_of(tmp_path, expression)
    verdicts = runner.check(ROUTE, problem, forms=(form,)).verdicts
    return runner, Finding.of(ROUTE, next(v for v in verdicts if v.statistic == form), problem)


def written(tmp_path: Path, made: Diagnosis) -> Path:
    return Path(folder.write(made, Report(tmp_path), environment("cpu")).path).parent


def status_of(text: str) -> int:
    """Of a script that has been read; an error of the kernel ends it with 1."""
    space: dict = {"__name__": "script"}
    exec(compile(text, "reproduce.py", "exec"), space)
    try:
        return space["main"]()
    except RuntimeError:
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("form", vars(wrong_forms.WRONG))
def test_a_form_that_differs_is_located_named_and_scripted(form, tmp_path, capfd):
    runner, finding = found(tmp_path, f"WRONG.{form}", form)
    made = diagnose(runner, finding, seconds=0.0)
    lines, where = dict(made.lines), written(tmp_path, made)
    assert f"in another form of the call ({form}): {made.location.wrong} of " in lines["what"]
    assert f"first at {finding.quantity}[" in lines["where"]
    assert lines["how"].startswith(VARIANTS[form].promise)
    text = (where / "report.md").read_text()
    assert f"another form, {form}, of which is promised that {VARIANTS[form].promise}" in text
    assert "`python reproduce.py`" in text and VARIANTS[form].promise in (where / "report.html").read_text()
    assert load_found(where / "problem.json") == (ROUTE, finding.quantity, "BUG", form)
    script = (where / "reproduce.py").read_text()
    assert status_of(script) == 1
    (count,) = re.findall(rf"^{finding.quantity}: (\d+) of \d+ elements differ$", capfd.readouterr().out, re.MULTILINE)
    added = made.results[1].numel() - made.results[0].numel() if form == "nan_tail" else 0
    assert int(count) == made.location.wrong + added
    assert status_of(script.replace(f"'WRONG.{form}'", "'right'").replace("'WRONG'", "'right'")) == 0


def test_what_the_future_changes_is_only_what_is_before_it(tmp_path):
    """`o` of the last third of a sequence is its own affair: no element of it counts as wrong."""
    made = diagnose(*found(tmp_path, "WRONG.causal", "causal"), seconds=0.0)
    last = {n: length - max(1, length // 3) for n, length in enumerate(PACKED.lengths)}
    wrong = made.field.wrong.nonzero()[:, 1].tolist()
    assert set(wrong) == {*range(last[0]), *range(3, 3 + last[2])}


def test_a_form_that_crashes_is_scripted_too(tmp_path):
    runner, finding = found(tmp_path, "refuses_views", "strided")
    assert (finding.quantity, finding.klass) == ("call", "CRASH")
    script = (written(tmp_path, diagnose(runner, finding, seconds=0.0)) / "reproduce.py").read_text()
    assert status_of(script) == 1
    assert status_of(script.replace("'refuses_views'", "'right'")) == 0


def test_what_only_the_sanitizer_sees_is_shown_where_it_is_and_else_said_so(tmp_path, capfd):
    verdict = Verdict("call", "CRASH", math.inf, "watched", "no kernel leaves its memory: IndexError: o past its end")
    name = "always_reads_past_the_end"
    route = Route(ROUTE, "chunk", always_reads_past_the_end, PRECISION, origin=f"{__name__}:{name}")
    runner = Runner(Subject("reads", "", (route,)), "cpu", tmp_path, isolated=False)
    where = written(tmp_path, diagnose(runner, Finding.of(ROUTE, verdict, PACKED), seconds=0.0))
    text = (where / "report.md").read_text() + (where / "report.html").read_text()
    assert "another form, watched" in text and "kda replay problem.json" in text
    script = (where / "reproduce.py").read_text()
    assert status_of(script) == 1
    assert "out-of-bounds load: kernel past_the_end" in capfd.readouterr().out
    right = script.replace(repr(__name__), repr(MODULE)).replace(repr(name), "'right'")
    assert status_of(right) == 0
    alone = script.replace("from harness import interpreter", "raise ImportError")
    assert status_of(alone) == 2
    said = capfd.readouterr().out
    assert "only the sanitizer sees this" in said and "`kda replay problem.json`" in said


def test_single_elements_with_gaps_have_bits(tmp_path):
    runner, finding = found(tmp_path, "WRONG.strided", "strided")
    script = (written(tmp_path, diagnose(runner, finding, seconds=0.0)) / "reproduce.py").read_text()
    space: dict = {"__name__": "script"}
    exec(compile(script, "reproduce.py", "exec"), space)
    one = torch.ones(1, 1, 1, 1)
    assert space["same_bits"](space["spread"](one), one) and not space["same_bits"](space["spread"](one), -one)


def test_compare_runs_the_form_that_the_file_names(tmp_path, capsys):
    path = tmp_path / "problem.json"
    path.write_text(PACKED.to_json({"route": ROUTE, "quantity": "o", "class": "BUG", "form": "negated_keys"}))
    compare = ["compare", str(path), "--routes", ROUTE, "--device", "cpu", "--report", str(tmp_path), "--subjects"]
    assert main([*compare, f"{MODULE}:plain"]) == 0
    assert main([*compare, f"{MODULE}:odd"]) == 1
    assert "in the form negated_keys too" in capsys.readouterr().out


def test_a_form_is_followed_only_where_it_applies_and_by_its_own_verdict(tmp_path):
    runner, finding = found(tmp_path, "WRONG.nan_tail", "nan_tail")
    assert runner.fails_like(finding, PACKED)
    assert runner.verdict_like(finding, DENSE) is None
    other = replace(finding, variant="negated_keys")  # right in that form
    assert runner.verdict_like(other, PACKED).klass == "OK"


def test_a_form_that_does_not_exist_is_refused(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(Problem().to_json({"route": ROUTE, "quantity": "o", "class": "BUG", "form": "sideways"}))
    with pytest.raises(ValueError, match="form 'sideways'; it must be one of"):
        load_found(path)


@triton.jit
def past_the_end(x, y, N, BLOCK: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    tl.store(y + o_n, tl.load(x + o_n), mask=o_n < N)


CALLS = itertools.count()


def always_reads_past_the_end(**kwargs):
    """What comes of it is not used."""
    past_the_end[(1,)](torch.zeros(3), torch.empty(3), 3, 4)
    return wrong_forms.right(**kwargs)


def reads_past_the_end(**kwargs):
    """Wrong in the first call only, as what lies there may be."""
    o, *rest = always_reads_past_the_end(**kwargs)
    return (o + (next(CALLS) == 0), *rest)


def test_what_comes_and_goes_is_explained_by_the_sanitizer(tmp_path):
    route = Route(ROUTE, "chunk", reads_past_the_end, PRECISION)
    runner = Runner(Subject("reads", "", (route,)), "cpu", tmp_path, isolated=False)
    problem = replace(PACKED, loss="none")
    wrong = next(v for v in runner.check(ROUTE, problem).verdicts if v.klass == "BUG")
    lines = dict(diagnose(runner, Finding.of(ROUTE, wrong, problem), seconds=0.0).lines)
    assert "seen once, and not again" in lines["what"]
    assert "out-of-bounds load: kernel past_the_end" in lines["how"]


def test_nan_in_the_call_itself_is_a_difference():
    case = materialise(PACKED)
    first, second = {"o": torch.full((1, 9, 2, 3), torch.nan)}, {"o": torch.zeros(1, 9, 2, 3)}
    field = between(VARIANTS["strided"], case, "o", first, second)
    assert int(field.wrong.sum()) == 54
