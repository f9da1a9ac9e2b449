"""Authority on the direction of knowledge: oracle knows mathematics, kda knows the GPU, harness knows both."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {"oracle": {"kda", "harness", "triton"}, "kda": {"oracle", "harness"}}


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a module imports anywhere, inside functions and in string calls to import_module too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {arg.value.split(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_direction(package):
    files = modules(package)
    assert files, f"{package}/ holds no modules"
    wrong = {
        str(path.relative_to(ROOT)): bad
        for path in files
        if (bad := imported_packages(path.read_text()) & FORBIDDEN[package])
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import kda.gate", {"kda"}),
        ("def f():\n    from harness.problem import Problem", {"harness"}),
        ("import importlib\nimportlib.import_module('triton.language')", {"importlib", "triton"}),
        ("from . import gate", set()),
    ],
    ids=["plain", "inside_function", "import_module", "relative"],
)
def test_import_scanner(source, expected):
    assert imported_packages(source) == expected


@pytest.mark.parametrize("package", ["kda", "oracle", "harness"])
def test_every_module_says_what_it_is_the_authority_on(package):
    silent = [
        str(path.relative_to(ROOT)) for path in modules(package) if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_kernels_have_one_grid_axis():
    """The others end at 65535 programs."""
    axes = {
        (path.name, ast.unparse(argument))
        for path in modules("kda")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("program_id", "num_programs")
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
    }
    assert axes and {axis for _, axis in axes} == {"0"}, axes


def test_no_machine_paths_are_committed():
    """A committed path of somebody's machine is wrong on every other one."""
    words = ("/" + "work/", "/" + "root/", ".lib" + "rary")
    suffixes = {".py", ".md", ".toml", ".txt", ".yml"}
    hits = [
        str(path.relative_to(ROOT))
        for package in ("kda", "oracle", "harness", "tests", "docs")
        for path in (ROOT / package).rglob("*")
        if path.suffix in suffixes and any(word in path.read_text() for word in words)
    ]
    assert hits == []
