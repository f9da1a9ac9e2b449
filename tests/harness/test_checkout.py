"""Subjects of a folder: NAME@FOLDER is imported from there, in child processes too, and nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import checkout
from harness.foreign import taken
from harness.problem import Problem
from harness.runner import Runner
from harness.subject import load_subject

PROBLEM = Problem(entry="chunk", lengths=(5,), K=4, V=4, k="unit", v="gauss", g="mild", beta="uniform", loss="none")
KERNEL = """
import kda

__version__ = "9.9"

def chunk_kda(**given):
    with kda.force_route("torch"):
        o, *rest = kda.chunk_kda(**given)
    return o * {factor}, *rest
"""
OF_AN_OLD_RELEASE = """
import kda

def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_gate_in_kernel=False,
              transpose_state_layout=False, **kwargs):
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    with kda.force_route("torch"):
        return kda.chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state,
                             use_gate_in_kernel=use_gate_in_kernel, state_v_first=transpose_state_layout,
                             A_log=A_log, dt_bias=dt_bias)

def fused_recurrent_kda(q, k, v, g, beta):
    raise NotImplementedError
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package of one file in a folder of its own, and forgets it again."""
    names = set()
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(folder: str, name: str, source: str) -> Path:
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / "__init__.py").write_text(source)
        names.add(name)
        return tmp_path / folder

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]


@pytest.mark.parametrize("factor, klass", [(1, "OK"), (1.01, "BUG")], ids=["right", "wrong"])
def test_a_child_process_imports_it_from_there(package, tmp_path, factor, klass):
    folder = package("source", "a_kernel_of_a_folder", KERNEL.format(factor=factor))
    subject = load_subject(f"a_kernel_of_a_folder@{folder}")
    assert (subject.name, subject.version) == (f"a_kernel_of_a_folder@{folder}", "source")
    runner = Runner(subject, "cpu", tmp_path)
    try:
        verdicts = runner.check("chunk-unbounded", PROBLEM).verdicts
    finally:
        runner.close()
    assert {v.quantity: v.klass for v in verdicts}["o"] == klass


def test_one_process_has_it_from_one_folder(package):
    first, second = (package(name, "a_kernel_twice", KERNEL.format(factor=1)) for name in ("one", "two"))
    load_subject(f"a_kernel_twice:chunk_kda@{first}")
    with pytest.raises(ValueError, match=r"a_kernel_twice is imported from .*one.* already; one process cannot"):
        load_subject(f"a_kernel_twice@{second}")


@pytest.mark.parametrize(
    "name, complaint",
    [("kda@nowhere", "'nowhere' must be a folder"), ("fla@.", "holds no package fla"), ("math@.", "no package math")],
)
def test_a_folder_without_it_is_refused(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_subject(name)


def test_the_version_is_that_of_what_is_installed_there_or_the_commit(tmp_path):
    (tmp_path / "a_kernel-1.2.dist-info").mkdir()
    (tmp_path / "a_kernel-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: a-kernel\nVersion: 1.2\n"
    )
    assert checkout.version(tmp_path, "a-kernel") == "1.2"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert checkout.version(tmp_path / "none") == "source"
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert checkout.version(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert checkout.version(tmp_path) == f"{commit}+"


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_fla_of_an_old_release_by_the_names_of_then(package, tmp_path, v_first):
    folder = package("checkout", "fla", "")
    for name, source in (
        ("ops", ""),
        ("ops/kda", OF_AN_OLD_RELEASE),
        ("ops/kda/gate", "def fused_kda_gate(g, A_log): raise NotImplementedError"),
    ):
        (folder / "fla" / name).mkdir()
        (folder / "fla" / name / "__init__.py").write_text(source)
    subject = load_subject(f"fla@{folder}")
    chunk = subject.route("chunk-unbounded", "chunk")
    states = {"initial_state": True, "h0": "gauss", "v_first": v_first}
    verdicts = Runner(subject, "cpu", tmp_path, isolated=False).check(chunk.id, Problem(**{**vars(PROBLEM), **states}))
    assert {v.quantity: v.klass for v in verdicts.verdicts} == {"o": "OK", "ht": "OK"}
    raw = {"gate": "lower_bound", "lower_bound": -5.0, "g": "gauss"}
    assert chunk.lacks(Problem(**{**vars(PROBLEM), **raw})) == "has no argument lower_bound"
    assert chunk.lacks(Problem(**{**vars(PROBLEM), "l2norm": True})) == "has no argument use_qk_l2norm_in_kernel"
    from fla.ops.kda import chunk_kda

    assert "A_log" in taken(chunk_kda) and "state_v_first" not in taken(chunk_kda)
